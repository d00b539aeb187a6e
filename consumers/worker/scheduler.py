"""Which digests may be in the engine, and which jobs start next. Pure: it is told the time and decides.

One queue per digest. At most `open_max` digests are open, that is, may start jobs. A digest closes when its queue is
empty; where others wait and it has been open for a quantum it drains: at most one at a time, so that no slot is left
idle that queued work could use, and no cold digest waits for ever (plain vLLM lets it: facts/vllm.md section 4).
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

from consumers.worker.fair import Counters, Demands, LoadLimits, Rows, WaitClocks
from consumers.worker.plan import Entry, Part, Plan, Start
from consumers.worker.residency import Owner, Resident, Slots, choose
from schemas.jobs import JobClass
from schemas.record import Coordinates
from schemas.service import Batch, WaitReason

# How long a digest may start jobs while another waits for its place.
QUANTUM_S = 1.0
# A job whose deadline is this near goes first.
URGENT_S = 2.0
# A digest whose decodes are long holds its slot for so long while shorter ones drain before it.
LONG_TURN_S = 10.0
# Digests that are brought into host memory before their turn.
PREFETCH_MAX = 8
# Batch jobs start behind interactive ones, but not behind those that came so much later.
BATCH_WAIT_S = 10.0


@dataclass(kw_only=True)
class _Turn:
    opened_at: float
    owner: str
    draining: bool = False


@dataclass(kw_only=True)
class Scheduler:
    """Queues and turns. `open_max` is the engine's slots, or 1 where it does not mix adapters in a step."""

    open_max: int
    rows: int
    quantum_s: float = QUANTUM_S
    # By tenant; one that is not here has the default part.
    parts: Mapping[str, Part] = field(default_factory=dict)
    _queues: dict[str, deque[Entry]] = field(default_factory=dict)
    _running: dict[Coordinates, Entry] = field(default_factory=dict)
    _turns: dict[str, _Turn] = field(default_factory=dict)
    _counters: Counters = field(default_factory=Counters)
    _clocks: WaitClocks = field(default_factory=WaitClocks)
    _limits: LoadLimits = field(default_factory=LoadLimits)
    # Digests on their way from the store, and their owners.
    _coming: dict[str, str] = field(default_factory=dict)
    # Readings of the clocks when each waiting job came, and the time of a load for the job that caused it.
    _came: dict[Coordinates, Counter[WaitReason]] = field(default_factory=dict)
    _load_ms: dict[str, int] = field(default_factory=dict)
    _charged_ms: dict[Coordinates, int] = field(default_factory=dict)
    _in_host: Set[str] = frozenset()
    _batches: int = 0
    _demands: Demands = field(default_factory=Demands)

    def add(self, entry: Entry) -> None:
        self._arrive(entry)
        self._queues.setdefault(entry.digest, deque()).append(entry)

    def add_first(self, entry: Entry) -> None:
        """Back to the head of its queue: it was started already."""
        self._arrive(entry)
        self._queues.setdefault(entry.digest, deque()).appendleft(entry)

    def withdraw(self, unwanted: Collection[Entry]) -> None:
        """Take entries out of their queues."""
        for entry in unwanted:
            queue = self._queues.get(entry.digest)
            if queue is not None and entry in queue:
                queue.remove(entry)
            self._came.pop(entry.request, None)

    def started(self, entry: Entry) -> None:
        self._running[entry.request] = entry

    def ended(self, entry: Entry, completion_tokens: int = 0) -> None:
        if self._running.pop(entry.request, None) is not None:
            load_ms = self._charged_ms.pop(entry.request, 0)
            weight = self._part(entry.tenant).weight
            self._counters.ended(entry.tenant, entry.route.limits, weight, completion_tokens, load_ms)

    def loaded(self, digest: str, owner: str, load_ms: int, now: float, *, from_store: bool = True) -> None:
        """A load is over, or a part of it: the first job of its queue caused it. Host memory is not the store."""
        if from_store:
            self._limits.loaded(owner, now)
        self._load_ms[digest] = self._load_ms.get(digest, 0) + load_ms

    def coming(self, digest: str, owner: str) -> None:
        """It is on its way from the store, and counts beside the loads that are over."""
        self._coming[digest] = owner

    def came(self, digest: str) -> None:
        """Here, and told as loaded, or not to be had."""
        self._coming.pop(digest, None)

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

    def working(self) -> dict[str, Owner]:
        """Owners of adapters that jobs wait for or run under, with their parts."""
        owners = {entry.owner for entry in (*self.queued, *self._running.values())}
        return {name: Owner(weight=self._part(name).weight, floor=self._part(name).floor) for name in owners}

    def plan(self, now: float, resident: Set[str], in_host: Set[str] = frozenset()) -> Plan:
        """Open and close turns, then say what to load and what to start."""
        self._in_host = in_host
        self._queues = {digest: queue for digest, queue in self._queues.items() if queue}
        # A load whose jobs ended meanwhile is nobody's.
        self._load_ms = {digest: ms for digest, ms in self._load_ms.items() if digest in self._queues}
        self._clocks.pass_to(now, {digest: self._held_up_by(digest, resident, now) for digest in self._queues})
        self._close_turns()
        self._drain_one(now, resident)
        self._open_turns(now, resident)
        missing = [digest for digest in self._turns if digest not in resident]
        later = [digest for digest in self._waiting(now, resident) if digest not in resident]
        entries = tuple(self._startable(now, resident))
        return Plan(
            load=missing[0] if missing else None,
            prefetch=(*missing[1:], *later)[:PREFETCH_MAX],
            start=self._starts(entries),
        )

    def _part(self, tenant: str) -> Part:
        return self.parts.get(tenant) or Part()

    def _arrive(self, entry: Entry) -> None:
        working = {other.tenant for other in (*self.queued, *self._running.values())}
        if entry.tenant not in working:
            self._counters.arrived(entry.tenant, working)
        self._came[entry.request] = self._clocks.reading(entry.digest)

    def _held_up_by(self, digest: str, resident: Set[str], now: float) -> WaitReason:
        turn = self._turns.get(digest)
        kept_back = digest not in resident and not self._may_load(digest, now)
        if turn is None and (kept_back or self._at_most(self._queues[digest][0].owner)):
            return WaitReason.QUOTA
        if turn is None or turn.draining:
            return WaitReason.SLOT
        return WaitReason.QUEUE if digest in resident else WaitReason.LOAD

    def _may_load(self, digest: str, now: float) -> bool:
        """A load is counted when it is over, so those that are on their way count beside them."""
        if digest in self._in_host:
            return True
        owner = self._queues[digest][0].owner
        coming = {name for name, whose in self._coming.items() if whose == owner}
        coming |= {name for name, turn in self._turns.items() if turn.owner == owner and name not in self._in_host}
        return self._limits.allows(owner, self._part(owner).loads_per_minute, now, len(coming - {digest}))

    def _close_turns(self) -> None:
        for digest in list(self._turns):
            busy = self.in_use(digest)
            if not busy and (self._turns[digest].draining or digest not in self._queues):
                del self._turns[digest]

    def _waiting(self, now: float, resident: Set[str]) -> list[str]:
        """Digests without a turn that may have one: those of the owners that are emptiest by their share first."""
        held = Counter(turn.owner for turn in self._turns.values())
        waiting = [d for d in self._queues if d not in self._turns and (d in resident or self._may_load(d, now))]

        def order(digest: str) -> tuple[float, float]:
            head = self._queues[digest][0]
            return held[head.owner] / self._part(head.owner).weight, head.queued_at

        return sorted(waiting, key=order)

    def _drain_one(self, now: float, resident: Set[str]) -> None:
        """Only under contention, only one, only after its quantum: draining more starves the batch."""
        if any(turn.draining for turn in self._turns.values()):
            return
        over = {digest for digest, turn in self._turns.items() if now - turn.opened_at >= self.quantum_s}
        if not over:
            return
        order = sorted(self._turns, key=lambda digest: self._drains_in(digest, now))
        residents = [Resident(digest=name, owner=self._turns[name].owner, score=at) for at, name in enumerate(order)]
        slots = Slots(count=self.open_max, residents=residents, working=self.working())
        for digest in self._waiting(now, resident):
            owner = self._queues[digest][0].owner
            if len(self._turns) < self.open_max and not self._at_most(owner):
                continue
            own = {name for name in over if self._turns[name].owner == owner}
            choice = choose(owner, slots, own if self._at_most(owner) else over)
            if choice is not None:
                self._turns[choice.digest].draining = True
                if not self.in_use(choice.digest):
                    del self._turns[choice.digest]
                return

    def _drains_in(self, digest: str, now: float) -> tuple[int, float]:
        """The tokens that its longest job may still make, and its age: a long decode must not hold up a newcomer."""
        turn = self._turns[digest]
        longest = max((e.route.limits.tokens_max for e in self._running.values() if e.digest == digest), default=0)
        return longest if now - turn.opened_at < LONG_TURN_S else 0, turn.opened_at

    def _at_most(self, owner: str) -> bool:
        """Whether an owner has as many adapters open as it may have resident."""
        most = self._part(owner).resident_max
        return most is not None and sum(turn.owner == owner for turn in self._turns.values()) >= most

    def _open_turns(self, now: float, resident: Set[str]) -> None:
        for digest in self._waiting(now, resident):
            owner = self._queues[digest][0].owner
            # Asked again: each turn that opens here may be a load more.
            may = digest in resident or self._may_load(digest, now)
            if may and len(self._turns) < self.open_max and not self._at_most(owner):
                self._turns[digest] = _Turn(opened_at=now, owner=owner)

    def _starts(self, entries: tuple[Entry, ...]) -> tuple[Start, ...]:
        company = [*self._running.values(), *entries]
        if entries:
            self._batches += 1
        batch = Batch(number=self._batches, rows=len(company), adapters=len({entry.digest for entry in company}))
        starts = []
        for entry in entries:
            load_ms = self._load_ms.pop(entry.digest, 0)
            self._charged_ms[entry.request] = load_ms
            self._counters.started(entry.tenant, entry.route.limits, self._part(entry.tenant).weight)
            waited_for = self._clocks.longest_since(entry.digest, self._came.get(entry.request, Counter()))
            starts.append(Start(entry=entry, waited_for=waited_for, batch=batch, load_ms=load_ms))
        return tuple(starts)

    def _startable(self, now: float, resident: Set[str]) -> Iterator[Entry]:
        """Heads of open, resident queues while rows are free and a few are at hand: the least served tenant's first."""
        if any(entry.alone for entry in self._running.values()):
            return
        rows = self._rows(now)
        queues = {
            digest: deque(self._queues[digest])
            for digest, turn in self._turns.items()
            if digest in resident and not turn.draining and digest in self._queues
        }
        # What starts now counts at once, so that one tenant does not take all the room of one plan.
        taken: Counter[str] = Counter()
        while queues:
            digest = min(queues, key=lambda d: self._order(queues[d][0], now, taken, rows))
            entry = queues[digest].popleft()
            if entry.alone:
                if not rows.running:
                    yield entry
                return
            if not queues[digest] or not rows.has_room(entry.tenant):
                del queues[digest]
            if rows.has_room(entry.tenant):
                yield entry
                rows.running[entry.tenant] += 1
                taken[entry.tenant] += entry.charge(self._part(entry.tenant).weight)

    def _rows(self, now: float) -> Rows:
        running = Counter(entry.tenant for entry in self._running.values())
        wanted = running + Counter(entry.tenant for entry in self.queued)
        demands = self._demands.at(now, wanted)
        weights = {tenant: self._part(tenant).weight for tenant in demands}
        return Rows(count=self.rows, running=running, weights=weights, demands=demands)

    def _order(self, entry: Entry, now: float, taken: Counter[str], rows: Rows) -> tuple[bool, bool, int, int, float]:
        """Near its deadline; interactive, or waiting for long; by its tenant's counter and rows; by its arrival."""
        patient = entry.route.job_class is JobClass.BATCH and now - entry.queued_at < BATCH_WAIT_S
        counter = self._counters.of(entry.tenant) + taken[entry.tenant]
        return entry.expires_at - now > URGENT_S, patient, counter, rows.running[entry.tenant], entry.queued_at
