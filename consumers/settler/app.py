"""The settler process: FastStream reads `metering` in batches; the work is done here, so that its failures end us.

FastStream logs what a handler raises and polls on, and the next commit would pass over the failed batch. So the handler
only hands its batch over, waits until it is done, and commits; a batch that fails is never committed.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage
from faststream.kafka.message import KafkaAckableMessage
from faststream.security import SASLScram512

from consumers.settler.settle import Settler
from infra.failpoints import Failpoints
from infra.kafka.clients import FETCH_WAIT_MS, HEARTBEAT_MS, PARTITION_FETCH_BYTES, REBALANCE_MS, SESSION_MS
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import incoming
from infra.logs import ActionLog
from infra.process import Process, run
from infra.redis import connect
from infra.settings import KafkaSettings, RedisSettings, read
from ledger.store import Ledger
from schemas.topics import METERING

log = ActionLog("settler")

BATCH_RECORDS_MAX = 500
# An empty poll waits twice this long; it is the most that a lease outlives its job.
BATCH_WAIT_MS = 50
# What a stop waits for a batch in work; a batch takes a few calls and one append.
DRAIN_S = 10.0

Batch = tuple[KafkaMessage, "asyncio.Future[None]"]


def main() -> int:
    return run(_work)


async def _work(process: Process) -> None:
    kafka = read(KafkaSettings)
    life = f"{process.name}-{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as opened:
        ledger = Ledger(connect(read(RedisSettings)))
        opened.push_async_callback(ledger.close)
        publisher = Publisher(kafka, life, process.clock)
        opened.push_async_callback(publisher.stop)
        await publisher.start()
        audit = AuditWriter(publisher, life)
        await audit.start()
        settler = Settler(ledger, audit, publisher, process.metrics, process.clock, Failpoints.from_environment())
        await _consume(process, kafka, settler)
        await audit.close()


async def _consume(process: Process, kafka: KafkaSettings, settler: Settler) -> None:
    """Until a stop is asked for: the batch in work is finished and committed. Raises what the work raises."""
    inbox: asyncio.Queue[Batch] = asyncio.Queue(maxsize=1)
    over = asyncio.Event()
    broker = make_broker(kafka, _handing_over(inbox, over))
    async with AsyncExitStack() as opened:
        opened.push_async_callback(broker.stop)
        # The handler of a batch that failed must not be waited for.
        opened.callback(over.set)
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(_settle(inbox, settler))
            await broker.start()
            process.not_ready = lambda: "the ledger is closed" if settler.waits_for_ledger else None
            await process.stopping.wait()
            log.info("settler.stopping")
            await broker.stop()
            working.cancel()


async def _settle(inbox: "asyncio.Queue[Batch]", settler: Settler) -> None:
    while True:
        message, done = await inbox.get()
        await settler.apply([incoming(record) for record in message.raw_message])
        done.set_result(None)


def _handing_over(inbox: "asyncio.Queue[Batch]", over: asyncio.Event) -> Callable[[KafkaMessage], Awaitable[None]]:
    async def hand_over(message: KafkaMessage) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await inbox.put((message, done))
        ended = asyncio.create_task(over.wait())
        await asyncio.wait((done, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if done.done():
            # A commit that fails is harmless: all of it is done, and what comes again changes nothing.
            await message.ack()

    return hand_over


def make_broker(kafka: KafkaSettings, handler: Callable[[KafkaMessage], Awaitable[None]]) -> KafkaBroker:
    """The subscription, with every option of delivery named."""
    broker = KafkaBroker(
        kafka.bootstrap,
        security=SASLScram512(kafka.username, kafka.password, use_ssl=kafka.protocol == "SASL_SSL"),
        client_id=kafka.username,
        consumer_only=True,
        allow_auto_create_topics=False,
        graceful_timeout=DRAIN_S,
        # Not "faststream": that one brings a handler of its own, whose lines are no JSON.
        logger=logging.getLogger("settler.broker"),
    )

    async def parse(records: tuple[object, ...]) -> KafkaMessage:
        """Leave headers alone: one that cannot be decoded would have its record skipped without a word."""
        return KafkaAckableMessage(body=b"", raw_message=records, consumer=subscriber.consumer)

    async def decode(_: KafkaMessage) -> None:
        return

    subscriber = broker.subscriber(
        METERING.name,
        batch=True,
        group_id=kafka.group("settler"),
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        rebalance_timeout_ms=REBALANCE_MS,
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_records=BATCH_RECORDS_MAX,
        batch_timeout_ms=BATCH_WAIT_MS,
        ack_policy=AckPolicy.MANUAL,
        no_reply=True,
        parser=parse,
        decoder=decode,
    )
    subscriber(handler)
    return broker
