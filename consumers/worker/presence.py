"""What a worker says of itself on `workers`: routers open their windows by it."""

import asyncio

from consumers.worker.doors import Doors
from infra.logs import ActionLog
from schemas.adapters import WorkerGone, WorkerReady
from schemas.topics import WORKERS

log = ActionLog("worker")


class Presence:
    """Announces the served partitions whenever they change, and the orderly end."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._changed = asyncio.Event()
        self._partitions: tuple[int, ...] = ()
        self._rows = doors.engine.build.rows

    def serve(self, partitions: tuple[int, ...]) -> None:
        self._partitions = partitions
        self._changed.set()

    def allow(self, rows: int) -> None:
        """Announce so many rows from now on: routers admit for these."""
        self._rows = rows
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            build = self._doors.engine.build
            ready = WorkerReady(
                worker=self._doors.worker,
                pool=self._doors.pool,
                base=self._doors.base,
                engine=build.id,
                slots=build.slots,
                rows=self._rows,
                partitions=self._partitions,
                rank_max=build.rank_max,
                context_max=build.context_max,
            )
            await self._doors.publisher.publish(WORKERS.name, self._doors.worker, ready)
            log.info("worker.ready", partitions=ready.partitions, rows=ready.rows)

    async def gone(self) -> None:
        record = WorkerGone(worker=self._doors.worker, pool=self._doors.pool)
        await self._doors.publisher.publish(WORKERS.name, self._doors.worker, record)
