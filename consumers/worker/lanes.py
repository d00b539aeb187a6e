"""The partitions this worker owns, and which of their records are in hand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from consumers.worker.finisher import Finisher
from consumers.worker.plan import Entry
from infra.clock import Clock
from infra.failpoints import Failpoints
from infra.kafka.lane import Lane, LaneLost
from infra.kafka.records import Incoming, Outgoing, dead_letter
from infra.logs import ActionLog
from infra.metrics import Metrics
from schemas.record import Coordinates

log = ActionLog("worker")

Lost = Callable[[Sequence[Lane]], Awaitable[None]]


class Lanes:
    """Open lanes with their finishers. One that was lost takes nothing and commits nothing."""

    def __init__(self, worker: str, metrics: Metrics, clock: Clock, failpoints: Failpoints) -> None:
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        self._failpoints = failpoints
        self._finishers: dict[Lane, Finisher] = {}
        self._tasks: dict[Lane, asyncio.Task[None]] = {}
        self._in_hand: dict[Coordinates, tuple[Lane, Incoming]] = {}

    @property
    def owned(self) -> list[Lane]:
        return list(self._finishers)

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(sorted(lane.partition.partition for lane in self._finishers))

    def open(self, lane: Lane, tasks: asyncio.TaskGroup, on_lost: Lost) -> None:
        finisher = Finisher(lane, self._metrics, self._clock, self._failpoints)
        self._finishers[lane] = finisher
        self._tasks[lane] = tasks.create_task(self._commit(finisher, on_lost))

    def close(self, lane: Lane) -> None:
        """Stop committing. What was in hand begins again at the next owner."""
        self._finishers.pop(lane, None)
        task = self._tasks.pop(lane, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def take(self, lane: Lane, record: Incoming) -> bool:
        """Note a record that was read. False when it is finished already or the lane is not ours."""
        finisher = self._finishers.get(lane)
        return finisher is not None and finisher.completions.read(record.offset)

    def hold(self, lane: Lane, record: Incoming) -> None:
        self._in_hand[record.coordinates] = (lane, record)

    def held(self, entry: Entry) -> tuple[Lane, Incoming]:
        """Where an entry in hand came from."""
        return self._in_hand[entry.request]

    def let_go(self, entry: Entry, lane: Lane) -> None:
        """The entry is left to another owner. One that came back meanwhile, on another lane, is not touched."""
        if entry.request in self._in_hand and self._in_hand[entry.request][0] is lane:
            self._in_hand.pop(entry.request)

    def finish(self, entry: Entry, lane: Lane, records: Sequence[Outgoing], poison: bool = False) -> None:
        """The entry ended with these records; a poisonous one is kept as a dead letter too."""
        held_by, record = self._in_hand.get(entry.request, (None, None))
        if held_by is not lane or record is None:
            return
        self._in_hand.pop(entry.request)
        letters = [self._letter(record, "poison", "the worker crashed each time it ran this job")] if poison else []
        if lane in self._finishers:
            self._finishers[lane].finish(record.offset, [*records, *letters])

    def refuse(self, lane: Lane, record: Incoming, reason: str, detail: str) -> None:
        """A record that is no route of ours: a dead letter, and nothing else."""
        self._metrics.count("routes_refused", reason=reason)
        log.warning("route.refused", reason=reason, source=str(record.coordinates))
        if lane in self._finishers:
            self._finishers[lane].finish(record.offset, [self._letter(record, reason, detail)])

    async def drained(self) -> None:
        """Everything that ended is committed."""
        await asyncio.gather(*(finisher.drained() for finisher in self._finishers.values()))

    def _letter(self, record: Incoming, reason: str, detail: str) -> Outgoing:
        self._metrics.count("records_dead_lettered")
        return dead_letter(record, self._worker, reason, detail)

    async def _commit(self, finisher: Finisher, on_lost: Lost) -> None:
        try:
            await finisher.run()
        except LaneLost:
            log.warning("lane.lost", topic=finisher.lane.topic, partition=finisher.lane.partition.partition)
            await on_lost([finisher.lane])
