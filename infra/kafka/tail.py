"""Reading without a group: views that follow whole topics, and bounded replays."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition

from infra.clock import Clock
from infra.kafka import clients
from infra.kafka.records import Incoming, incoming
from infra.settings import KafkaSettings
from schemas.errors import SwitchyardError

# How long one poll of a tail waits; also how soon a stop is noticed.
POLL_MS = 100
# A replay that gets nothing for so many polls is not going on.
READ_POLLS_MAX = 600

Apply = Callable[[Incoming], None]


class ReadStalled(SwitchyardError):
    """A replay got no further although its end was not reached."""


class Tail:
    """Follows whole topics and hands every record to `apply`, in order.

    It begins at their beginning, or with `from_end` at their end; `places` names other offsets, by topic and partition.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Iterable[str],
        apply: Apply,
        clock: Clock,
        from_end: bool = False,
        places: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self._consumer = clients.make_consumer(settings)
        self._topics = tuple(topics)
        self._apply = apply
        self._clock = clock
        self._from_end = from_end
        self._places = places or {}
        self._stopping = False
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Connect and read to the end as it stands now."""
        await clients.start(self._consumer)
        partitions = await assign(self._consumer, self._topics)
        ends = await clients.within(clients.START_S, "reading ends", self._consumer.end_offsets(partitions))
        if self._from_end:
            for partition, end in ends.items():
                self._consumer.seek(partition, end)
            return
        await self._consumer.seek_to_beginning(*partitions)
        for partition in partitions:
            place = self._places.get((partition.topic, partition.partition))
            if place is not None:
                self._consumer.seek(partition, place)
        # A position, not the last record's offset: markers of transactions leave gaps (facts 6.6).
        while not await self._reached(ends):
            await self._poll()

    async def run(self) -> None:
        """Follow until `stop` is called. Raises what `apply` raises: a view that cannot be folded must not live."""
        while not self._stopping:
            await self._poll()

    async def stop(self) -> None:
        self._stopping = True
        await clients.stop(self._consumer)

    async def fresh(self, within_ms: int) -> bool:
        """Whether this view stands at the high watermark of a fetch that the broker answered that recently."""
        now_ms = self._clock.now_ms()
        for partition in self._consumer.assignment():
            asked_ms = self._consumer.last_poll_timestamp(partition)
            if asked_ms is None or now_ms - asked_ms > within_ms:
                return False
            if await self._consumer.position(partition) < (self._consumer.highwater(partition) or 0):
                return False
        return True

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something that `apply` brings about. False when it did not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def _poll(self) -> None:
        polled = await self._consumer.getmany(timeout_ms=POLL_MS)
        for records in polled.values():
            for record in records:
                self._apply(incoming(record))
        if polled:
            async with self._changed:
                self._changed.notify_all()

    async def _reached(self, ends: dict[TopicPartition, int]) -> bool:
        return all([await self._consumer.position(partition) >= end for partition, end in ends.items()])


async def assign(consumer: AIOKafkaConsumer, topics: Iterable[str]) -> list[TopicPartition]:
    """Assign every partition of topics that exist. Raises SwitchyardError naming one that does not."""
    partitions: list[TopicPartition] = []
    for topic in topics:
        found = await clients.within(clients.START_S, f"asking for {topic}", partitions_of(consumer, topic))
        partitions.extend(TopicPartition(topic, number) for number in sorted(found))
    consumer.assign(partitions)
    return partitions


async def partitions_of(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    """The partitions of a topic. Raises SwitchyardError when this user sees no such topic."""
    known = consumer.partitions_for_topic(topic)
    if known is None:
        # Not in the cached metadata: a consumer learns of a topic by asking for its ends.
        await consumer._client.add_topic(topic)  # noqa: SLF001 - no public way to fetch metadata for one topic
        known = consumer.partitions_for_topic(topic)
    if not known:
        raise SwitchyardError(f"topic {topic} does not exist, or this user may not read it")
    return set(known)


async def read_range(
    settings: KafkaSettings, topic: str, partition: int, start: int | None = None, end: int | None = None
) -> AsyncIterator[Incoming]:
    """A partition's committed records from `start` (its beginning) up to `end` (where it ends now), exclusive."""
    place = TopicPartition(topic, partition)
    consumer = clients.make_consumer(settings)
    await clients.start(consumer)
    try:
        consumer.assign([place])
        first = (await consumer.beginning_offsets([place]))[place]
        last = (await consumer.end_offsets([place]))[place]
        stop_at = last if end is None else min(end, last)
        consumer.seek(place, max(first, start or 0))
        while await consumer.position(place) < stop_at:
            for record in await _next_of(consumer, place):
                if record.offset < stop_at:
                    yield record
    finally:
        await clients.stop(consumer)


async def _next_of(consumer: AIOKafkaConsumer, place: TopicPartition) -> list[Incoming]:
    """The next records; none where only a transaction's marker was passed. Raises ReadStalled."""
    before = await consumer.position(place)
    for _ in range(READ_POLLS_MAX):
        polled = await consumer.getmany(place, timeout_ms=POLL_MS)
        if polled or await consumer.position(place) > before:
            return [incoming(record) for record in polled.get(place, [])]
    raise ReadStalled


async def end_offsets(settings: KafkaSettings, topic: str) -> dict[int, int]:
    """Where each partition of a topic ends now (the last stable offset)."""
    consumer = clients.make_consumer(settings)
    await clients.start(consumer)
    try:
        partitions = await assign(consumer, [topic])
        found = await clients.within(clients.START_S, "reading ends", consumer.end_offsets(partitions))
        return {place.partition: int(offset) for place, offset in found.items()}
    finally:
        await clients.stop(consumer)


async def offset_at(settings: KafkaSettings, topic: str, partition: int, timestamp_ms: int) -> int | None:
    """The first offset of a partition at or after a time; None when there is none."""
    consumer = clients.make_consumer(settings)
    await clients.start(consumer)
    try:
        place = TopicPartition(topic, partition)
        consumer.assign([place])
        found = await clients.within(
            clients.START_S, "seeking a time", consumer.offsets_for_times({place: timestamp_ms})
        )
        return None if found[place] is None else int(found[place].offset)
    finally:
        await clients.stop(consumer)
