"""Reads one digest's partition of the audit, from its offsets at one time to those at another."""

from consumers.audit.closure import Closure, Coverage, Entry, Evidence
from infra.kafka.publisher import partition_for
from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets, offset_at, read_range
from infra.settings import KafkaSettings
from schemas.audit import AUDIT_RECORDS
from schemas.errors import InvalidRecord
from schemas.record import decode_one_of
from schemas.topics import AUDIT


async def replay(
    settings: KafkaSettings, digest: str, since_ms: int | None = None, until_ms: int | None = None
) -> Evidence:
    """Everything from `since_ms` up to `until_ms`, exclusive; without them from the first record to the last."""
    ends = await end_offsets(settings, AUDIT.name)
    partition = partition_for(digest, len(ends))
    start, end = 0, ends[partition]
    if since_ms is not None:
        start = await _offset(settings, partition, since_ms, end)
    if until_ms is not None:
        end = await _offset(settings, partition, until_ms, end)
    coverage = Coverage(digest=digest, partition=partition, partitions=len(ends), start=start, end=max(start, end))
    closure = Closure(coverage)
    async for record in read_range(settings, AUDIT.name, partition, coverage.start, coverage.end):
        closure.add(entry_of(record))
    return closure.evidence()


async def _offset(settings: KafkaSettings, partition: int, time_ms: int, end: int) -> int:
    found = await offset_at(settings, AUDIT.name, partition, time_ms)
    return end if found is None else min(found, end)


def entry_of(record: Incoming) -> Entry:
    try:
        decoded = decode_one_of(AUDIT_RECORDS, record.value)
    except InvalidRecord:
        decoded = None
    return Entry(
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        key=(record.key or b"").decode(errors="replace"),
        record=decoded,
    )
