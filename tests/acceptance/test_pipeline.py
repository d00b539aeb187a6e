"""From a tenant's record to its final reply, through every process, on the engine that sleeps through its steps."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from producers.job import Job
from producers.preview import Reset, Token
from schemas.audit import AUDIT_RECORDS, Admitted, CancelRequested, Finished, Started
from schemas.jobs import JobClass, Outcome, Parameters, RequestCancelled, RequestRouted
from schemas.metering import UsageRecorded
from schemas.record import Identity, Record, decode_one_of
from schemas.replies import FINAL_REPLIES, JobCompleted, JobFailed, JobRejected
from schemas.topics import BATCH, CANCELS, DLQ_TOPIC, JOBS, METERING, REPLIES, REQUESTS
from tests.members import start_served
from tests.world import World, make_world_on

pytestmark = pytest.mark.timeout(240)

WAIT_S = 90.0
ENGINE = EngineSettings(kind="fake", slots=2, rows=8, step_ms=40)
_numbers = count(1)
StartWorker = Callable[[World], Awaitable[str]]


@pytest.fixture
def start_worker(whole: Stack) -> Iterator[StartWorker]:
    names: list[str] = []

    async def start(world: World) -> str:
        names.append(f"worker-{world.pool}-{len(names)}")
        await start_served(whole, names[-1], ENGINE, world.pool)
        return names[-1]

    yield start
    for name in names:
        whole.processes[name].kill()


@asynccontextmanager
async def world_of(whole: Stack, tenants: int = 1) -> AsyncIterator[tuple[World, list[str]]]:
    number = next(_numbers)
    names = [f"who-{number}-{n}" for n in range(tenants)]
    for name in names:
        await asyncio.to_thread(whole.add_tenant, name)
    limits = {"concurrency_max": 1000}
    async with make_world_on(whole, f"pool-{number}", dict.fromkeys(names, ("a", "b", "c")), limits) as world:
        yield world, names


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def read(world: World, topic: str, *kinds: type[Record]) -> list[Record]:
    return [decode_one_of(kinds, record.value) for record in await world.read(topic)]


async def follow(job: Job) -> tuple[str, list[int]]:
    """What a reader ends with, and the attempts it saw."""
    text, attempts = "", [1]
    async for event in job.events():
        if isinstance(event, Reset):
            text = ""
            attempts.append(event.attempt)
        elif isinstance(event, Token):
            text += event.text
    return text, attempts


async def test_killing_the_worker_in_mid_stream_leaves_the_reader_one_clean_stream(
    whole: Stack, start_worker: StartWorker
) -> None:
    async with world_of(whole) as (world, (tenant,)), JobClient(whole.kafka(tenant), tenant) as client:
        first = await start_worker(world)
        jobs = [
            await client.submit(alias=alias, prompt="Go on.", parameters=Parameters(max_tokens=60))
            for alias in ("a", "b") * 4
        ]
        readers = [asyncio.create_task(follow(job)) for job in jobs]

        async def streaming() -> bool:
            return sum((await end_offsets(whole.kafka("admin"), f"stream.{tenant}")).values()) > 40

        await until(streaming)
        whole.processes[first].kill()
        await start_worker(world)
        async with asyncio.timeout(WAIT_S):
            seen = await asyncio.gather(*readers)
            finals = [await job.result() for job in jobs]
        assert any(len(attempts) > 1 for _, attempts in seen), "some stream was cut and began again"
        for (text, attempts), final in zip(seen, finals, strict=True):
            assert isinstance(final, JobCompleted)
            assert text == final.text
            assert attempts[-1] <= final.receipt.attempt
        replies = await read(world, REPLIES.of(tenant), *FINAL_REPLIES)
        assert Counter(type(reply) for reply in replies) == {JobCompleted: len(jobs)}
        usage = await identities(world, [tenant], UsageRecorded)
        assert {len(records) for records in usage.values()} == {1}
        assert len(usage) == len(jobs)


async def test_a_thousand_broken_records_between_fifty_good_ones_cost_only_themselves(
    whole: Stack, start_worker: StartWorker
) -> None:
    async with world_of(whole) as (world, (tenant,)):
        await start_worker(world)
        producer = Producer({**whole.kafka(tenant).librdkafka(), "log_level": 2})
        broken = [
            b"",
            b"{",
            b"\xff\xfe",
            b"null",
            b"[]",
            b'{"job_id":"x"}',
            b'{"a":1,"a":2}',
            b"[" * 5000,
            b'{"n":NaN}',
        ]
        for number in range(1050):
            good = json.dumps(
                {"job_id": f"good-{number}", "alias": "a", "prompt": "Hi", "parameters": {"max_tokens": 4}}
            )
            value = good.encode() if number % 21 == 0 else broken[number % len(broken)] + (b" " * (number % 3))
            producer.produce(BATCH.of(tenant), value)
        assert producer.flush(30) == 0

        async def answered() -> bool:
            replies = await read(world, REPLIES.of(tenant), *FINAL_REPLIES)
            return sum(isinstance(reply, JobCompleted) for reply in replies) == 50

        await until(answered)
        replies = Counter(type(reply) for reply in await read(world, REPLIES.of(tenant), *FINAL_REPLIES))
        assert replies == {JobCompleted: 50, JobRejected: 1000}
        letters = [r for r in await world.read("dlq") if dict(r.headers)[DLQ_TOPIC] == BATCH.of(tenant).encode()]
        assert len(letters) == 1000
        assert whole.processes["router"].exit_code() is None
        assert await lag(whole, tenant) == 0


async def lag(whole: Stack, tenant: str) -> int:
    """How far the router's committed place on the tenant's batch topic is behind its end."""
    options = {**whole.kafka("admin").librdkafka(), "group.id": "router.router", "log_level": 2}
    consumer = Consumer(options)
    try:
        (place,) = await asyncio.to_thread(consumer.committed, [TopicPartition(BATCH.of(tenant), 0)], 10)
    finally:
        consumer.close()
    ends = await end_offsets(whole.kafka("admin"), BATCH.of(tenant))
    return int(ends[0] - place.offset)


async def test_every_record_of_a_job_carries_one_identity(whole: Stack, start_worker: StartWorker) -> None:
    """Joined over all topics: route, cancellation, reply, usage and every audit record."""
    async with world_of(whole, tenants=2) as (world, tenants):
        await start_worker(world)
        for tenant in tenants:
            async with JobClient(whole.kafka(tenant), tenant) as client:
                jobs = [
                    await client.submit(alias=alias, prompt="Go on.", parameters=Parameters(max_tokens=tokens))
                    for alias, tokens in (("a", 4), ("b", 200), ("base", 4), ("c", 4))
                ]
                async for _ in jobs[1]:
                    await jobs[1].cancel()
                    break
                async with asyncio.timeout(WAIT_S):
                    finals = [await job.result() for job in jobs]
                assert Counter(type(final) for final in finals) == {JobCompleted: 3, JobFailed: 1}

        async def settled() -> bool:
            return len(await identities(world, tenants, Finished)) == 8

        await until(settled)
        found = await identities(world, tenants)
        kinds = {kind for records in found.values() for kind, _ in records}
        expected: set[type[Record]] = {
            RequestRouted,
            RequestCancelled,
            UsageRecorded,
            Admitted,
            CancelRequested,
            Started,
            Finished,
        }
        assert kinds == {kind.type_name() for kind in expected} | {"reply"}
        for (tenant, job_id), records in found.items():
            assert len({identity for _, identity in records}) == 1, f"{tenant}/{job_id}: {records}"
            identity = records[0][1]
            assert identity.tenant == tenant
            assert identity.adapter in {world.digests[tenant, alias] for alias in ("a", "b", "c", "base")}


Blocks = dict[tuple[str, str], list[tuple[str, Identity]]]


async def identities(world: World, tenants: list[str], *only: type[Record]) -> Blocks:
    """Every identity block in the log, by job, with the type of its record."""
    sources: list[tuple[str, tuple[type[Record], ...]]] = [
        (REQUESTS.of(world.pool), (RequestRouted,)),
        (CANCELS.of(world.pool), (RequestCancelled,)),
        (METERING.name, (UsageRecorded,)),
        ("audit", AUDIT_RECORDS),
        *((REPLIES.of(tenant), FINAL_REPLIES) for tenant in tenants),
    ]
    blocks: Blocks = {}
    for topic, kinds in sources:
        for record in await read(world, topic, *kinds):
            if only and not isinstance(record, only):
                continue
            name, identity = block_of(record)
            if identity is not None and identity.tenant in tenants:
                job_id = record.route.job_id if isinstance(record, RequestRouted) else getattr(record, "job_id")  # noqa: B009
                blocks.setdefault((identity.tenant, str(job_id)), []).append((name, identity))
    return blocks


def block_of(record: Record) -> tuple[str, Identity | None]:
    if isinstance(record, RequestRouted):
        return record.type, record.route.identity
    if isinstance(record, JobCompleted | JobFailed):
        return "reply", record.receipt.identity
    return record.type, getattr(record, "identity", None)


async def test_a_job_posted_as_plain_json_by_any_client_works_the_same(whole: Stack, start_worker: StartWorker) -> None:
    async with world_of(whole) as (world, (tenant,)):
        await start_worker(world)
        settings = {**whole.kafka(tenant).librdkafka(), "log_level": 2}
        consumer = Consumer({**settings, "group.id": f"{tenant}.mine", "auto.offset.reset": "earliest"})
        consumer.subscribe([REPLIES.of(tenant)])
        producer = Producer(settings)
        job = {"job_id": "plain-1", "alias": "a", "messages": [{"role": "user", "content": "Hello"}]}
        producer.produce(JOBS.of(tenant), json.dumps(job).encode(), headers=[("correlation_id", b"\x00\x01binary")])
        assert producer.flush(30) == 0
        message = await asyncio.to_thread(consumer.poll, WAIT_S)
        consumer.close()
        assert message is not None
        headers = dict(message.headers())
        assert headers["correlation_id"] == b"\x00\x01binary"
        assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
        reply = decode_one_of(FINAL_REPLIES, message.value())
        assert isinstance(reply, JobCompleted)
        assert reply.receipt.identity.adapter == world.digests[tenant, "a"]


async def test_cancelling_before_and_while_running_ends_the_job_once(whole: Stack, start_worker: StartWorker) -> None:
    async with world_of(whole) as (world, (tenant,)), JobClient(whole.kafka(tenant), tenant) as client:
        await start_worker(world)
        running = await client.submit(alias="a", prompt="Go on.", parameters=Parameters(max_tokens=400))
        async for _ in running:
            await running.cancel()
            break
        queued = await client.submit(
            alias="a", prompt="Go on.", job_class=JobClass.BATCH, parameters=Parameters(max_tokens=400)
        )
        await queued.cancel()
        async with asyncio.timeout(WAIT_S):
            first, second = await running.result(), await queued.result()
        assert isinstance(first, JobFailed)
        assert first.outcome is Outcome.CANCELLED
        assert 0 < first.usage.completion_tokens < 400
        assert isinstance(second, JobFailed | JobRejected)


def test_headers_of_an_incoming_record_are_never_a_source_of_identity() -> None:
    record = Incoming(
        topic="jobs.acme", partition=0, offset=0, timestamp_ms=0, key=None, value=b"{}",
        headers=(("ce_subject", b"sha256:0"), ("tenant", b"globex"), ("kafka_correlationId", b"\x01")),
    )  # fmt: skip
    assert dict(record.echoes()) == {"kafka_correlationId": b"\x01"}
