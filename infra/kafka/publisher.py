"""Appending records outside transactions: idempotent, acknowledged by all replicas, awaited."""

import asyncio
from collections.abc import Iterable, Sequence
from functools import lru_cache

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2

from infra.clock import Clock
from infra.kafka import clients
from infra.kafka.records import Outgoing, Stamp
from infra.settings import KafkaSettings
from schemas.audit import AuditRecord, WriterClosed
from schemas.record import Coordinates, Record
from schemas.topics import AUDIT

# Hashing a key in Python costs as much as sending it; digests and tenants come again.
KEYS_REMEMBERED_MAX = 4096


class Publisher:
    """Appends records with their headers. One per process; `source` names the process and its life."""

    def __init__(self, settings: KafkaSettings, source: str, clock: Clock, linger_ms: int = 0) -> None:
        self.stamp = Stamp(source=source)
        self._settings = settings
        self._clock = clock
        self._linger_ms = linger_ms
        self._producer: AIOKafkaProducer | None = None

    async def start(self) -> None:
        producer = clients.make_producer(self._settings, linger_ms=self._linger_ms)
        await clients.start(producer)
        self._producer = producer

    async def stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await clients.stop(producer)

    def outgoing(
        self,
        topic: str,
        key: str,
        record: Record,
        subject: str | None = None,
        partition: int | None = None,
        extra: Iterable[tuple[str, bytes | None]] = (),
    ) -> Outgoing:
        """A record with this process's headers, to be sent here or inside a lane's transaction."""
        return self.stamp.outgoing(topic, key, record, self._clock.now_ms(), subject, partition, extra)

    def encoded(
        self,
        topic: str,
        key: str,
        kind: type[Record],
        value: bytes,
        subject: str | None = None,
        partition: int | None = None,
        extra: Iterable[tuple[str, bytes | None]] = (),
    ) -> Outgoing:
        """As `outgoing`, for a record of that kind whose canonical bytes are at hand."""
        return self.stamp.encoded(topic, key, kind, value, self._clock.now_ms(), subject, partition, extra)

    async def publish(
        self, topic: str, key: str, record: Record, subject: str | None = None, partition: int | None = None
    ) -> Coordinates:
        """Append one record and wait until it is acknowledged."""
        sending = self._send_all([self.outgoing(topic, key, record, subject, partition)])
        (metadata,) = await clients.within(clients.SEND_S, "appending a record", sending)
        return coordinates_of(metadata)

    async def send_all(self, records: Sequence[Outgoing]) -> None:
        """Append records in order within each partition and wait for every one."""
        await clients.within(clients.SEND_S, "appending records", self._send_all(records))

    async def _send_all(self, records: Sequence[Outgoing]) -> list[object]:
        return await asyncio.gather(*[await self.enqueue(record) for record in records])

    async def enqueue(self, record: Outgoing) -> "asyncio.Future[object]":
        """Hand a record to the client and return the future of its acknowledgement."""
        if self._producer is None:
            raise RuntimeError("the publisher is not started")
        future: asyncio.Future[object] = await self._producer.send(
            record.topic,
            value=record.value,
            key=record.key,
            partition=record.partition,
            headers=list(record.headers),
        )
        return future

    async def partitions_of(self, topic: str) -> int:
        if self._producer is None:
            raise RuntimeError("the publisher is not started")
        found = await clients.within(clients.START_S, f"asking for {topic}", self._producer.partitions_for(topic))
        return len(found)


async def acknowledged(future: "asyncio.Future[object]") -> Coordinates:
    """Where a sent record lies, once it does."""
    return coordinates_of(await future)


def coordinates_of(metadata: object) -> Coordinates:
    """The place that an acknowledgement names."""
    return Coordinates(
        topic=str(getattr(metadata, "topic")),  # noqa: B009 - aiokafka ships no types
        partition=int(getattr(metadata, "partition")),  # noqa: B009
        offset=int(getattr(metadata, "offset")),  # noqa: B009
    )


@lru_cache(KEYS_REMEMBERED_MAX)
def partition_for(key: str, partitions: int) -> int:
    """The partition that Kafka's default partitioner gives a key."""
    return int((murmur2(key.encode()) & 0x7FFFFFFF) % partitions)


class AuditWriter:
    """Appends audit records, numbered per partition from 0 in this process life."""

    def __init__(self, publisher: Publisher, writer: str) -> None:
        self.writer = writer
        self._publisher = publisher
        self._partitions = 0
        self._next: dict[int, int] = {}
        # Numbers and order of appending must agree, so that both happen under one lock.
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        self._partitions = await self._publisher.partitions_of(AUDIT.name)

    async def append(self, key: str, record: AuditRecord) -> Coordinates:
        """Append one record under its digest (or `tenant/<tenant>`) and wait until it is acknowledged."""
        (metadata,) = await clients.within(clients.SEND_S, "appending to the audit", self._append_all([(key, record)]))
        return coordinates_of(metadata)

    async def append_all(self, records: Sequence[tuple[str, AuditRecord]]) -> None:
        """Append records in order and wait for every one."""
        await clients.within(clients.SEND_S, "appending to the audit", self._append_all(records))

    async def close(self) -> None:
        """Say on every partition written to that nothing of this life follows."""
        written = sorted(self._next)
        async with self._lock:
            waiting = [await self._enqueue(self.writer, partition, WriterClosed()) for partition in written]
        await clients.within(clients.SEND_S, "closing the audit", _all(waiting))

    async def _append_all(self, records: Sequence[tuple[str, AuditRecord]]) -> list[object]:
        async with self._lock:
            waiting = [await self._enqueue(key, partition_for(key, self._partitions), r) for key, r in records]
        return await _all(waiting)

    async def _enqueue(self, key: str, partition: int, record: AuditRecord) -> "asyncio.Future[object]":
        number = self._next.get(partition, 0)
        self._next[partition] = number + 1
        subject = key if key.startswith("sha256:") else None
        numbered = record.numbered(self.writer, number)
        return await self._publisher.enqueue(self._publisher.outgoing(AUDIT.name, key, numbered, subject, partition))


async def _all(waiting: "Sequence[asyncio.Future[object]]") -> list[object]:
    return await asyncio.gather(*waiting)
