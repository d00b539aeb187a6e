"""One owned input partition: its fence, its committed place, and the transactions that move it."""

import asyncio
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from infra.kafka import clients
from infra.kafka.records import Outgoing
from schemas.errors import SwitchyardError

TRANSACTION_S = clients.TRANSACTION_MS / 1000


class LaneLost(SwitchyardError):
    """Another process took this partition over."""


class Lane:
    """One owned input partition: its fence, its committed place, and transactions that move it."""

    def __init__(self, partition: TopicPartition, group: str, producer: AIOKafkaProducer, fence: str) -> None:
        self.partition = partition
        self.fence = fence
        self.committed = 0
        self.metadata = ""
        # Where the partition ended when this lane was opened: a former owner may have worked on what lies before.
        self.opened_end = 0
        # The next offset to hand out; where the consumer is sought to after a rebalance.
        self.next = 0
        # Another process owns the partition; or records were deleted unread, and nobody may go on without a person.
        self.lost = False
        self.isolated = False
        self._group = group
        self._producer = producer
        self._lock = asyncio.Lock()

    @property
    def topic(self) -> str:
        return str(self.partition.topic)

    async def transact(self, records: Sequence[Outgoing], offset: int, metadata: str = "") -> None:
        """Append records and commit the input offset, all or nothing.

        Raises LaneLost when another owner fenced this one; any other Kafka error means the outcome is unknown and
        the process must end.
        """
        async with self._lock:
            if self.lost:
                raise LaneLost
            try:
                await clients.within(TRANSACTION_S, "committing", self._transact(records, offset, metadata))
            except (ProducerFenced, InvalidProducerEpoch) as error:
                self.lost = True
                raise LaneLost from error
        self.committed, self.metadata = offset, metadata

    async def _transact(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        await self._producer.begin_transaction()
        try:
            waiting = [
                await self._producer.send(
                    r.topic, value=r.value, key=r.key, partition=r.partition, headers=list(r.headers)
                )
                for r in records
            ]
            # Without this, aiokafka commits a transaction whose records failed.
            await asyncio.gather(*waiting)
            offsets = {self.partition: OffsetAndMetadata(offset, metadata)}
            await self._producer.send_offsets_to_transaction(offsets, self._group)
        except (ProducerFenced, InvalidProducerEpoch):
            raise
        except KafkaError:
            await self._producer.abort_transaction()
            raise
        await self._producer.commit_transaction()

    async def close(self) -> None:
        self.lost = True
        await clients.stop(self._producer)
