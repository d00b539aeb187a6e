"""Which digests may be in the engine, and which jobs start next. Pure: it is told the time and decides.

One queue per digest. At most `open_max` digests are open, that is, may start jobs. A digest closes when its queue is
empty; where others wait and it has been open for a quantum it drains: at most one at a time, so that no slot is left
idle that queued work could use, and no cold digest waits for ever (plain vLLM lets it: facts/vllm.md section 4).
"""

from collections import deque
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field

from schemas.jobs import JobSubmitted, Route, tenant_job
from schemas.record import Coordinates

# How long a digest may start jobs while another waits for its place.
QUANTUM_S = 1.0
# One job more than rows for so many rows: an engine has the next one at hand when a row gets free, instead of a step or
# two without it while that one begins.
ROWS_PER_SPARE = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A verified job in this worker's queue. The identity block is the route's, unchanged."""

    request: Coordinates
    route: Route
    job: JobSubmitted
    queued_at: float
    expires_at: float
    # A job whose executions ended in two crashes runs with nothing beside it that it could take down.
    alone: bool = False

    @property
    def digest(self) -> str:
        return self.route.identity.adapter

    @property
    def name(self) -> str:
        return tenant_job(self.route.identity.tenant, self.route.job_id)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now. `load` needs a free slot; which digest leaves for it is residency's choice."""

    load: str | None = None
    start: tuple[Entry, ...] = ()


@dataclass(kw_only=True)
class _Turn:
    opened_at: float
    draining: bool = False


@dataclass(kw_only=True)
class Scheduler:
    """Queues and turns. `open_max` is the engine's slots, or 1 where it does not mix adapters in a step."""

    open_max: int
    rows: int
    quantum_s: float = QUANTUM_S
    _queues: dict[str, deque[Entry]] = field(default_factory=dict)
    _running: dict[Coordinates, Entry] = field(default_factory=dict)
    _turns: dict[str, _Turn] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self._queues.setdefault(entry.digest, deque()).append(entry)

    def add_first(self, entry: Entry) -> None:
        """Back to the head of its queue: it was started already."""
        self._queues.setdefault(entry.digest, deque()).appendleft(entry)

    def withdraw(self, unwanted: Collection[Entry]) -> None:
        """Take entries out of their queues."""
        for entry in unwanted:
            queue = self._queues.get(entry.digest)
            if queue is not None and entry in queue:
                queue.remove(entry)

    def started(self, entry: Entry) -> None:
        self._running[entry.request] = entry

    def ended(self, entry: Entry) -> None:
        self._running.pop(entry.request, None)

    @property
    def queued(self) -> Iterator[Entry]:
        return (entry for queue in self._queues.values() for entry in queue)

    @property
    def queued_count(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def running(self) -> list[Entry]:
        return list(self._running.values())

    def in_use(self, digest: str) -> int:
        return sum(entry.digest == digest for entry in self._running.values())

    def wanted(self) -> frozenset[str]:
        """Digests that are open: residency must not evict them."""
        return frozenset(self._turns)

    def plan(self, now: float, resident: Set[str]) -> Plan:
        """Open and close turns, then say what to load and what to start."""
        self._queues = {digest: queue for digest, queue in self._queues.items() if queue}
        self._close_turns()
        self._drain_one(now)
        self._open_turns(now)
        missing = [digest for digest in self._turns if digest not in resident]
        return Plan(load=missing[0] if missing else None, start=tuple(self._startable(resident)))

    def _close_turns(self) -> None:
        for digest in list(self._turns):
            busy = self.in_use(digest)
            if not busy and (self._turns[digest].draining or digest not in self._queues):
                del self._turns[digest]

    def _drain_one(self, now: float) -> None:
        """Only under contention, only one, only after its quantum: draining more starves the batch."""
        full = len(self._turns) >= self.open_max
        contended = any(digest not in self._turns for digest in self._queues)
        if not (full and contended) or any(turn.draining for turn in self._turns.values()):
            return
        digest, turn = min(self._turns.items(), key=lambda item: item[1].opened_at)
        if now - turn.opened_at >= self.quantum_s:
            turn.draining = True
            if not self.in_use(digest):
                del self._turns[digest]

    def _open_turns(self, now: float) -> None:
        waiting = sorted((d for d in self._queues if d not in self._turns), key=lambda d: self._queues[d][0].queued_at)
        for digest in waiting[: max(0, self.open_max - len(self._turns))]:
            self._turns[digest] = _Turn(opened_at=now)

    def _startable(self, resident: Set[str]) -> Iterator[Entry]:
        """Heads of open, resident queues, oldest first, while rows are free and a few are at hand."""
        places = self.rows + self.rows // ROWS_PER_SPARE
        room = places - len(self._running)
        heads = {
            digest: iter(tuple(self._queues[digest]))
            for digest, turn in self._turns.items()
            if digest in resident and not turn.draining and digest in self._queues
        }
        next_of = {digest: next(entries) for digest, entries in heads.items()}
        if any(entry.alone for entry in self._running.values()):
            return
        while room > 0 and next_of:
            digest = min(next_of, key=lambda d: next_of[d].queued_at)
            entry = next_of.pop(digest)
            if entry.alone:
                if room == places:
                    yield entry
                return
            yield entry
            room -= 1
            following = next(heads[digest], None)
            if following is not None:
                next_of[digest] = following
