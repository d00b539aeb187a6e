"""Memory watched: what the engine's process holds, said part by part, and fewer rows before anything fails."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from consumers.engines.memory import Memory
from consumers.engines.protocol import EngineDead
from consumers.worker.adapters import Adapters
from consumers.worker.doors import Doors
from infra.files import write_private
from infra.logs import ActionLog
from infra.metrics import MEMORY_PARTS
from schemas.memory import AdapterSize, MemoryReport

log = ActionLog("worker")

WATCH_S = 2.0
# Parts of the limit. Between the marks nothing changes, so that rows do not flutter.
HIGH, LOW = 0.90, 0.80
REPORT = "memory.json"
# What has not changed is written again after this, so that the report's age tells a worker that no longer looks.
REPORT_AGE_MAX_MS = 60_000


@dataclass
class Watermark:
    """How many rows the memory allows. Pure: halved at every look above the high mark, doubled below the low one."""

    rows_max: int
    rows: int

    def look(self, memory: Memory) -> int:
        if memory.process >= HIGH * memory.limit:
            self.rows = max(1, self.rows // 2)
        elif memory.process <= LOW * memory.limit:
            self.rows = min(self.rows_max, self.rows * 2)
        return self.rows


class MemoryWatch:
    """Looks every WATCH_S, shows what it saw, and tells the worker how many rows there may be."""

    def __init__(self, doors: Doors, adapters: Adapters, allow: Callable[[int], None]) -> None:
        self._doors = doors
        self._adapters = adapters
        self._allow = allow
        rows = doors.engine.build.rows
        self._mark = Watermark(rows_max=rows, rows=rows)
        self._written: MemoryReport | None = None

    async def run(self) -> None:
        while self._doors.engine.healthy():
            # An engine that died is the worker's watch's to tell of: it first clears the jobs of the blame.
            with contextlib.suppress(EngineDead):
                await self.look()
            await asyncio.sleep(WATCH_S)

    async def look(self) -> None:
        memory, before = await self._doors.engine.memory(), self._mark.rows
        rows = self._mark.look(memory)
        shed = await self._adapters.shed() if memory.process >= HIGH * memory.limit else 0
        if rows != before or shed:
            log.warning("memory.rows", process=memory.process, limit=memory.limit, rows=rows, copies_dropped=shed)
            self._allow(rows)
        for part in MEMORY_PARTS:
            self._doors.metrics.set("memory_bytes", getattr(memory, part), part=part)
        self._doors.metrics.set("memory_rows", rows)
        report = self._report(memory, rows)
        if is_news(report, self._written):
            await asyncio.to_thread(write_private, self.path, report.model_dump_json(indent=1).encode())
            self._written = report

    def _report(self, memory: Memory, rows: int) -> MemoryReport:
        engine = self._doors.engine
        return MemoryReport(
            worker=self._doors.worker,
            engine=engine.build.id,
            base=self._doors.base,
            at_ms=self._doors.clock.now_ms(),
            rows=rows,
            rows_max=engine.build.rows,
            unexplained=memory.unexplained,
            slot_bytes=engine.sizes.slot_bytes,
            bytes_per_rank=dict(engine.sizes.per_rank),
            adapters=tuple(
                AdapterSize(rank=rank, modules=modules, bytes=size, predicted=engine.sizes.whole(rank, modules))
                for (rank, modules), size in sorted(engine.sizes.measured.items())
            ),
            **{field.name: getattr(memory, field.name) for field in fields(memory)},
        )

    @property
    def path(self) -> Path:
        """Beside the worker's cache of artifacts."""
        return self._doors.cache.parent / REPORT


def is_news(report: MemoryReport, written: MemoryReport | None) -> bool:
    """Whether a report says more than the last one that was written, or that one is old."""
    if written is None or report.at_ms - written.at_ms >= REPORT_AGE_MAX_MS:
        return True
    return report != written.model_copy(update={"at_ms": report.at_ms})
