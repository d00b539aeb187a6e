"""The end of jobs of one lane: final replies, metering records and the input offset in one short transaction."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from infra.clock import Clock
from infra.failpoints import Failpoints
from infra.kafka.completions import Completions, decode
from infra.kafka.lane import Lane
from infra.kafka.records import Outgoing
from infra.metrics import Metrics

# Jobs that end this close together share a transaction.
GROUP_COMMIT_S = 0.01
BATCH_RECORDS_MAX = 500


@dataclass(frozen=True, kw_only=True)
class _Ended:
    offset: int
    records: tuple[Outgoing, ...]


class Finisher:
    """Commits one lane. Nothing is generated inside a transaction, and one is open at a time."""

    def __init__(self, lane: Lane, metrics: Metrics, clock: Clock, failpoints: Failpoints) -> None:
        self.lane = lane
        self.completions: Completions = decode(lane.committed, lane.metadata)
        # Set by whoever runs it.
        self.task: asyncio.Task[None] | None = None
        self._metrics = metrics
        self._clock = clock
        self._failpoints = failpoints
        self._ended: list[_Ended] = []
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def finish(self, offset: int, records: Sequence[Outgoing] = ()) -> None:
        """The record at this offset is done; these records say so."""
        self._ended.append(_Ended(offset=offset, records=tuple(records)))
        self._idle.clear()
        self._some.set()

    async def run(self) -> None:
        """Commit until cancelled. Raises LaneLost when another worker owns the partition now."""
        while True:
            await self._some.wait()
            await asyncio.sleep(GROUP_COMMIT_S)
            self._some.clear()
            while self._ended:
                await self._commit(self._take())
            self._idle.set()

    async def drained(self) -> None:
        await self._idle.wait()

    def _take(self) -> list[_Ended]:
        """At least one, and no more records than a short transaction holds."""
        taken: list[_Ended] = []
        count = 0
        while self._ended and (not taken or count + len(self._ended[0].records) <= BATCH_RECORDS_MAX):
            taken.append(self._ended.pop(0))
            count += len(taken[-1].records)
        return taken

    async def _commit(self, ended: list[_Ended]) -> None:
        for job in ended:
            self.completions.finish(job.offset)
        records = [record for job in ended for record in job.records]
        began = self._clock.monotonic()
        self._failpoints.reach("ending")
        await self.lane.transact(records, self.completions.watermark, self.completions.encode())
        self._failpoints.reach("ended")
        self._metrics.observe("transaction_seconds", self._clock.monotonic() - began)
