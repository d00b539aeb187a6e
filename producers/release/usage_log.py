"""Reads a tenant's usage from `metering`, whose records are every tenant's: what is not its own is not even parsed."""

import asyncio
import contextlib
from collections.abc import Callable

from infra.kafka.tail import end_offsets, offset_at, read_range
from infra.settings import KafkaSettings
from producers.release.usage import TenantUsage
from schemas.errors import InvalidRecord
from schemas.metering import UsageRecorded
from schemas.record import PlatformDecoder
from schemas.topics import METERING

# A record's time is a producer's, and a job ended before it: by so much clocks may have been set back between the two.
CLOCK_SLACK_MS = 10 * 60_000

# Called with how much of the way is read, in percent. A number of records would tell how much others use.
Progress = Callable[[int], None]

_METERING = PlatformDecoder[UsageRecorded](UsageRecorded)


class UsageLog:
    """One reading of `metering`, up to its ends as they stand when it begins."""

    def __init__(self, settings: KafkaSettings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._offsets = 0
        self._read: dict[int, int] = {}
        self._shown = -1

    async def fold(self, usage: TenantUsage) -> None:
        ends = await end_offsets(self._settings, METERING.name)
        starts = await asyncio.gather(*(self._start(partition, end, usage.since_ms) for partition, end in ends.items()))
        ranges = [(partition, start, end) for (partition, end), start in zip(ends.items(), starts, strict=True)]
        self._offsets = sum(end - start for _, start, end in ranges)
        await asyncio.gather(*(self._fold(usage, *found) for found in ranges if found[1] < found[2]))

    async def _start(self, partition: int, end: int, since_ms: int | None) -> int:
        if since_ms is None:
            return 0
        found = await offset_at(self._settings, METERING.name, partition, max(0, since_ms - CLOCK_SLACK_MS))
        return end if found is None else min(found, end)

    async def _fold(self, usage: TenantUsage, partition: int, start: int, end: int) -> None:
        # As `encode` writes it: most records are others', and parsing takes most of the time.
        own = f'"tenant":"{usage.tenant}"'.encode()
        async for record in read_range(self._settings, METERING.name, partition, start, end):
            if own in (record.value or b""):
                # The settler dead-letters what cannot be read; the operator sees it there.
                with contextlib.suppress(InvalidRecord):
                    usage.apply(_METERING.decode(record.value))
            self._passed(partition, record.offset + 1 - start)

    def _passed(self, partition: int, offsets: int) -> None:
        self._read[partition] = offsets
        percent = sum(self._read.values()) * 100 // self._offsets
        if percent > self._shown:
            self._shown = percent
            self._progress(percent)
