"""How many jobs a second the router process routes, beside a bare loop with the same input and output."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from consumers.router.loop import LANE_RECORDS_MAX
from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from infra.redis import connect
from schemas.jobs import JobSubmitted, Parameters
from schemas.topics import AUDIT, BATCH, REQUESTS, Role, Topic
from tests.bench.bare import LIBRARY, BareTask, Drained, Sample
from tests.bench.children import BenchFailed, Say, measured_by
from tests.bench.figures import Figure
from tests.factories import ready
from tests.members import in_the_group
from tests.world import PARTITIONS, make_world_on

POOL = "bench-router"
TENANT = "bench-router"
# Its topic holds the same jobs for the bare loop. It is no tenant of the registry, so that no router reads it.
BARE = "bench-bare"
ALIAS = "support"
NOBODY = "nobody"
# No place is ever short: what is measured is the router, not its patience.
PLENTY = 1_000_000
LOOK_S = 0.5
DRAIN_S = 120.0
FLUSH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    jobs: int
    rounds: int


async def measure(stack: Stack, effort: Effort, say: Say) -> list[Figure]:
    for name in (TENANT, BARE):
        await asyncio.to_thread(stack.add_tenant, name)
    await _load_nothing(stack)
    await asyncio.to_thread(_make_outputs, stack)
    await preload(stack, BARE, effort.jobs)
    ours: list[float] = []
    theirs: list[float] = []
    rows: dict[str, object] = {"concurrency_max": PLENTY}
    async with make_world_on(stack, POOL, {TENANT: [ALIAS]}, rows) as world, in_the_group(stack, POOL, NOBODY):
        await world.append([ready(world.base.base, NOBODY, POOL, PLENTY, range(PARTITIONS))])
        for number in range(effort.rounds):
            routed, audit, request = await _drain_by_router(stack, effort.jobs)
            ours.append(routed)
            theirs.append(await _drain_by_loop(stack, effort.jobs, number, audit, request))
            say(f"router: {ours[-1]:.0f} jobs/s, bare loop: {theirs[-1]:.0f} ({number + 1} of {effort.rounds})")
    jobs_per_s, peer = median(ours), median(theirs)
    return [
        Figure(name="router_ratio", value=jobs_per_s / peer, unit="ratio", peer=1.0),
        Figure(name="router_jobs_per_s", value=jobs_per_s, unit="jobs/s", peer=peer),
    ]


async def preload(stack: Stack, tenant: str, jobs: int) -> None:
    """Append jobs of ordinary size with a foreign client, before anybody reads them. No id is used twice."""
    ends = await end_offsets(stack.kafka("admin"), BATCH.of(tenant))
    await asyncio.to_thread(_append, stack, tenant, range(sum(ends.values()), sum(ends.values()) + jobs))


def _append(stack: Stack, tenant: str, numbers: range) -> None:
    producer = Producer({**stack.kafka(tenant).librdkafka(), "linger.ms": 5})
    for number in numbers:
        job = JobSubmitted(
            job_id=f"job-{number}",
            alias=ALIAS,
            prompt="Say something about the weather in one sentence.",
            parameters=Parameters(max_tokens=64, temperature=0.0),
        )
        producer.produce(BATCH.of(tenant), job.encode(), job.job_id)
        producer.poll(0)
    if producer.flush(FLUSH_S):
        raise BenchFailed("the jobs could not be appended")


async def _drain_by_router(stack: Stack, jobs: int) -> tuple[float, Incoming, Incoming]:
    """Jobs a second, and the last records of both kinds, as samples for the bare loop."""
    settings, topic = stack.kafka("admin"), REQUESTS.of(POOL)
    before = await end_offsets(settings, topic)
    audit_before = await end_offsets(settings, AUDIT.name)
    await preload(stack, TENANT, jobs)
    router = await asyncio.to_thread(stack.start, "bench-router", Role.ROUTER)
    try:
        async with asyncio.timeout(DRAIN_S):
            while sum((await end_offsets(settings, topic)).values()) < sum(before.values()) + jobs:
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise BenchFailed(f"the router did not route {jobs} jobs within {DRAIN_S:.0f} s: see {router.log}") from error
    finally:
        await asyncio.to_thread(router.stop)
    routed = await _read(stack, topic, before)
    audited = [record for record in await _read(stack, AUDIT.name, audit_before) if record.key == routed[-1].key]
    return jobs_per_s(routed), audited[-1], routed[-1]


async def _drain_by_loop(stack: Stack, jobs: int, number: int, audit: Incoming, request: Incoming) -> float:
    topic = _output(REQUESTS)
    before = await end_offsets(stack.kafka("admin"), topic)
    task = BareTask(
        kafka=stack.kafka("admin"),
        redis=stack.redis(Role.ROUTER),
        group=f"bare-{number}",
        topic=BATCH.of(BARE),
        records=jobs,
        batch=LANE_RECORDS_MAX,
        audit=_sample(audit, _output(AUDIT)),
        request=_sample(request, topic),
    )
    await measured_by("tests.bench.bare", task, Drained)
    return jobs_per_s(await _read(stack, topic, before))


def jobs_per_s(records: Sequence[Incoming]) -> float:
    """From the last record of the first batch to the very last: whole batches, and no start of a process."""
    times = sorted(record.timestamp_ms for record in records)
    return (len(times) - LANE_RECORDS_MAX) / (times[-1] - times[LANE_RECORDS_MAX - 1]) * 1000


async def _read(stack: Stack, topic: str, since: dict[int, int]) -> list[Incoming]:
    settings = stack.kafka("admin")
    return [
        record for partition, start in since.items() async for record in read_range(settings, topic, partition, start)
    ]


async def _load_nothing(stack: Stack) -> None:
    admin = connect(stack.redis("admin"))
    await admin.function_load(LIBRARY, replace=True)
    await admin.aclose()


def _output(topic: Topic) -> str:
    return f"bench-{(topic.prefix or topic.name).rstrip('.')}"


def _make_outputs(stack: Stack) -> None:
    """The bare loop's own topics, configured like the router's."""
    admin = AdminClient(stack.kafka("admin").librdkafka())
    made = admin.create_topics(
        [NewTopic(_output(topic), topic.partitions, 1, config=topic.config()) for topic in (AUDIT, REQUESTS)]
    )
    for future in made.values():
        future.result(FLUSH_S)


def _sample(record: Incoming, topic: str) -> Sample:
    return Sample(
        topic=topic,
        key=(record.key or b"").decode(),
        value=(record.value or b"").decode(),
        headers=tuple((name, (value or b"").decode()) for name, value in record.headers),
        partition=record.partition,
    )
