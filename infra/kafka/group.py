"""The one loop: a consumer group whose partitions are lanes, each with its own transactional producer.

aiokafka's transactions carry no group generation, so nothing but the producer's epoch keeps a former owner out:
the new owner starts the partition's producer (which fences the old one), then reads the committed offset and
the completion map, then works (design section 4.8; facts T2 to T4).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from infra.kafka import clients
from infra.kafka.lane import Lane, LaneLost
from infra.kafka.records import Incoming, incoming
from infra.logs import ActionLog
from infra.settings import KafkaSettings
from schemas.errors import SwitchyardError

log = ActionLog("kafka")

POLL_RECORDS_MAX = 500


LanesChanged = Callable[[Sequence[Lane]], Awaitable[None]]


class Group(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    """Polls the partitions this process owns. `on_open` and `on_lost` hear of lanes before they are read from
    and after another process may own them."""

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        on_open: LanesChanged,
        on_lost: LanesChanged,
        client_id: str = "switchyard",
    ) -> None:
        self.name = settings.group(name)
        self.lanes: dict[TopicPartition, Lane] = {}
        self._settings = settings
        self._on_open = on_open
        self._on_lost = on_lost
        self._consumer = clients.make_consumer(settings, self.name, client_id)
        self._admin = clients.make_admin(settings)
        self._paused: set[TopicPartition] = set()
        # Records polled under one assignment mean nothing under the next.
        self._assignment = 0
        self._gate_open = False
        self._topics: list[str] = []
        self._wanted: list[str] | None = None
        self._failure: BaseException | None = None

    async def start(self, topics: Iterable[str]) -> None:
        await clients.start(self._admin)
        await clients.start(self._consumer)
        self._topics = sorted(topics)
        self._consumer.subscribe(topics=self._topics, listener=self)

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read these topics from now on. Partitions move by a rebalance, which begins with the next poll."""
        self._wanted = sorted(topics)

    def _resubscribe(self) -> None:
        """Only between rebalances: one that a new subscription interrupts ends aiokafka's coordination for good."""
        if self._wanted is not None and self._gate_open:
            self._topics, self._wanted = self._wanted, None
            self._gate_open = False
            self._consumer.subscribe(topics=self._topics, listener=self)

    @property
    def assigned(self) -> bool:
        """Whether this process knows which partitions are its own, be they none."""
        return self._gate_open

    async def poll(self, timeout_ms: int, records_max: int = POLL_RECORDS_MAX) -> Mapping[Lane, list[Incoming]]:
        """At most so many records of each lane, in order. Call it often, also while every lane is paused: it is how
        the group lives.

        Never cancel it: a cancelled poll leaves aiokafka's bookkeeping wrong for ever.
        """
        if self._failure is not None:
            raise self._failure
        if self._topics and any(lane.lost and not lane.isolated for lane in self.lanes.values()):
            # Fenced while the group still gives it to us: rejoin, and open anew what is ours then.
            self._wanted = self._wanted or self._topics
        self._resubscribe()
        before = self._assignment
        polled = await self._consumer.getmany(timeout_ms=timeout_ms, max_records=records_max)
        await self._poll_others(polled, records_max)
        if not self._gate_open or before != self._assignment:
            self._seek(self.lanes.values())
            return {}
        readable = [(self.lanes[p], records) for p, records in polled.items() if self._is_readable(p)]
        for lane, records in readable:
            await self._check_continuity(lane, records[0].offset)
        if before != self._assignment:
            self._seek(self.lanes.values())
            return {}
        found: dict[Lane, list[Incoming]] = {}
        for lane, records in readable:
            if not lane.lost:
                lane.next = records[-1].offset + 1
                found[lane] = [incoming(record) for record in records]
        return found

    def _is_readable(self, partition: TopicPartition) -> bool:
        lane = self.lanes.get(partition)
        return lane is not None and not lane.lost and partition not in self._paused

    async def _poll_others(self, polled: dict[TopicPartition, list[object]], records_max: int) -> None:
        """aiokafka hands out the fullest partition's records first: ask for the others' until none has any at hand,
        so that a flood on one costs the others nothing."""
        found = sum(len(records) for records in polled.values())
        while found >= records_max and (others := self.lanes.keys() - polled.keys()):
            more = await self._consumer.getmany(*others, max_records=records_max)
            polled.update(more)
            found = sum(len(records) for records in more.values())

    def pause(self, lane: Lane) -> None:
        """Leave a lane's records where they are; polls go on."""
        if lane.partition not in self._paused and lane.partition in self._consumer.assignment():
            self._paused.add(lane.partition)
            self._consumer.pause(lane.partition)

    def resume(self, lane: Lane) -> None:
        if lane.partition in self._paused:
            self._paused.discard(lane.partition)
            if lane.partition in self._consumer.assignment():
                self._consumer.resume(lane.partition)

    async def commit(self, lane: Lane, offset: int) -> None:
        """Commit an input offset where nothing is appended with it. Raises LaneLost after a rebalance."""
        try:
            work = self._consumer.commit({lane.partition: OffsetAndMetadata(offset, "")})
            await clients.within(clients.SEND_S, "committing an offset", work)
        except KafkaError as error:
            raise LaneLost(f"the offset of {lane.partition} was not committed: {error}") from error
        lane.committed = offset

    async def stop(self) -> None:
        """Leave the group, then let the lanes go."""
        self._gate_open = False
        await clients.stop(self._consumer)
        for lane in self.lanes.values():
            await lane.close()
        self.lanes.clear()
        await clients.stop(self._admin)

    def on_partitions_revoked(self, revoked: object) -> None:
        """Close the gate. What comes back keeps its producer and its running jobs."""
        del revoked
        self._gate_open = False
        self._assignment += 1

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Let go what went, open what came, seek everything, then open the gate."""
        try:
            await self._assign(set(assigned))
        except (KafkaError, SwitchyardError, OSError, ValueError) as error:
            # aiokafka swallows what a listener raises; the next poll raises it instead.
            self._failure = error

    async def _assign(self, assigned: set[TopicPartition]) -> None:
        fenced = {partition for partition, lane in self.lanes.items() if lane.lost and not lane.isolated}
        gone = [self.lanes.pop(partition) for partition in (set(self.lanes) - assigned) | fenced]
        if gone:
            await self._on_lost(gone)
            await asyncio.gather(*(lane.close() for lane in gone))
        fresh = list(await asyncio.gather(*(self._open(partition) for partition in assigned - set(self.lanes))))
        if served := [lane for lane in fresh if not lane.isolated]:
            await self._on_open(served)
        self.lanes.update({lane.partition: lane for lane in fresh})
        self._seek(self.lanes.values())
        self._paused &= assigned
        if self._paused:
            self._consumer.pause(*self._paused)
        self._assignment += 1
        self._gate_open = True

    async def _open(self, partition: TopicPartition) -> Lane:
        transactional_id = f"{self.name}.{partition.topic}.{partition.partition}"
        producer = clients.make_producer(self._settings, transactional_id)
        await clients.start(producer)
        manager = producer._txn_manager  # noqa: SLF001 - the fence has no public name
        lane = Lane(partition, self.name, producer, f"{manager.producer_id}.{manager.producer_epoch}")
        # Only now: the producer's start finished or aborted what the former owner had open.
        committed = await clients.within(
            clients.START_S,
            "reading the committed offset",
            self._admin.list_consumer_group_offsets(self.name, partitions=[partition]),
        )
        place = committed.get(partition)
        if place is not None and place.offset >= 0:
            lane.committed, lane.metadata = place.offset, place.metadata
        else:
            lane.committed = await self._log_start(partition)
        lane.next = lane.committed
        lane.opened_end = await self._log_end(partition)
        await self._check_continuity(lane, lane.next, opening=True)
        return lane

    async def _log_start(self, partition: TopicPartition) -> int:
        found = await clients.within(
            clients.START_S, "reading the log start", self._consumer.beginning_offsets([partition])
        )
        return int(found[partition])

    async def _log_end(self, partition: TopicPartition) -> int:
        found = await clients.within(clients.START_S, "reading the log end", self._consumer.end_offsets([partition]))
        return int(found[partition])

    async def _check_continuity(self, lane: Lane, offset: int, opening: bool = False) -> None:
        """Transactions leave gaps; a log start beyond our place means that records were lost unread."""
        if offset == lane.next and not opening:
            return
        start = await self._log_start(lane.partition)
        if start > lane.next:
            lane.lost = lane.isolated = True
            if not opening:
                await self._on_lost([lane])
            log.error(
                "lane.isolated",
                topic=lane.topic,
                partition=lane.partition.partition,
                place=lane.next,
                log_start=start,
            )

    def _seek(self, lanes: Iterable[Lane]) -> None:
        owned = self._consumer.assignment()
        for lane in lanes:
            if lane.partition in owned:
                self._consumer.seek(lane.partition, lane.next)
