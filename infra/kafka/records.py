"""What crosses the door: a record read, a record to write, and the headers on it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache

from aiokafka.structs import ConsumerRecord

from schemas import topics
from schemas.record import Coordinates, Record

Headers = tuple[tuple[str, bytes | None], ...]

# What a client may send along to find its reply again (Spring's binary correlation id included): echoed, never read.
ECHOED = frozenset({"kafka_correlationId", "correlation_id"})
TRACEPARENT = "traceparent"
# A header is an echo of the client's own bytes: bounded like everything it sends.
ECHO_BYTES_MAX = 256


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A record as it was read. Headers are the sender's words: never a source of identity."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    @cached_property
    def coordinates(self) -> Coordinates:
        return Coordinates(topic=self.topic, partition=self.partition, offset=self.offset)

    def carried(self) -> Headers:
        """What the platform's own record hands on to every record that follows from it: echoes and trace context."""
        return tuple((name, value) for name, value in self.headers if name in ECHOED or name == TRACEPARENT)

    def opened(self) -> Headers:
        """What a tenant's record hands on. Its trace context is not to be trusted, so a trace begins here (W3C)."""
        seed = hashlib.sha256(str(self.coordinates).encode()).hexdigest()
        return (*self.echoes(), (TRACEPARENT, f"00-{seed[:32]}-{seed[32:48]}-01".encode()))

    def echoes(self) -> Headers:
        return tuple(
            (name, value)
            for name, value in self.headers
            if name in ECHOED and value is not None and len(value) <= ECHO_BYTES_MAX
        )


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A record to append. Without a partition the key decides (murmur2, as Kafka's own clients)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None


@dataclass(kw_only=True)
class Stamp:
    """Makes the CloudEvents 1.0 headers of one process life. `source` names the process and the life."""

    source: str
    count: int = field(default=0)

    @cached_property
    def _source(self) -> bytes:
        return f"/switchyard/{self.source}".encode()

    def outgoing(
        self,
        topic: str,
        key: str,
        record: Record,
        now_ms: int,
        subject: str | None = None,
        partition: int | None = None,
        extra: Iterable[tuple[str, bytes | None]] = (),
    ) -> Outgoing:
        """A record with its headers. `subject` is the adapter digest where there is one."""
        return self.encoded(topic, key, type(record), record.encode(), now_ms, subject, partition, extra)

    def encoded(
        self,
        topic: str,
        key: str,
        kind: type[Record],
        value: bytes,
        now_ms: int,
        subject: str | None = None,
        partition: int | None = None,
        extra: Iterable[tuple[str, bytes | None]] = (),
    ) -> Outgoing:
        """As `outgoing`, for a record of that kind whose canonical bytes are at hand."""
        self.count += 1
        headers = [
            ("ce_specversion", b"1.0"),
            ("ce_id", f"{self.source}/{self.count}".encode()),
            ("ce_type", _type_of(kind)),
            ("ce_source", self._source),
            ("ce_time", _time_of(now_ms)),
            ("content-type", b"application/json"),
        ]
        if subject is not None:
            headers.append(("ce_subject", subject.encode()))
        return Outgoing(
            topic=topic,
            key=key.encode(),
            value=value,
            headers=(*headers, *extra),
            partition=partition,
        )


@cache
def _type_of(kind: type[Record]) -> bytes:
    return f"switchyard.{kind.type_name()}.v{kind.model_fields['version'].default}".encode()


# The records of one batch are stamped within a millisecond or two.
@lru_cache(2)
def _time_of(now_ms: int) -> bytes:
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").encode()


def incoming(record: ConsumerRecord[bytes, bytes]) -> Incoming:
    """aiokafka's record as ours."""
    return Incoming(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp,
        key=record.key,
        value=record.value,
        headers=tuple(record.headers),
    )


def dead_letter(record: Incoming, component: str, reason: str, detail: str) -> Outgoing:
    """The original bytes, and beside them where they came from and why they were refused."""
    added = {
        topics.DLQ_REASON: reason,
        topics.DLQ_DETAIL: detail[:500],
        topics.DLQ_COMPONENT: component,
        topics.DLQ_TOPIC: record.topic,
        topics.DLQ_PARTITION: str(record.partition),
        topics.DLQ_OFFSET: str(record.offset),
        topics.DLQ_TIMESTAMP: str(record.timestamp_ms),
    }
    # A sender's own header of these names would forge the reason.
    kept = tuple((name, value) for name, value in record.headers if name not in added)
    return Outgoing(
        topic=topics.DLQ.name,
        key=record.topic.encode(),
        value=record.value,
        headers=(*kept, *((name, text.encode()) for name, text in added.items())),
    )
