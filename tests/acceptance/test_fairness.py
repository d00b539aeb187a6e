"""A flood of one tenant through the whole pipeline: what it costs the others, with one router and with two."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count

import pytest

from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from infra.provision import Provisioner
from infra.settings import EngineSettings
from producers.client import JobClient
from producers.job import Job
from schemas.jobs import JobClass, Parameters, RequestRouted
from schemas.replies import JobCompleted
from schemas.topics import REQUESTS, Role
from tests.bench import burst
from tests.factories import IN_WORDS, pool_of
from tests.members import start_served
from tests.world import make_world_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

# Long enough for the engine to be full of the flood many times over.
SECONDS = 12.0
RATIO_MAX = 1.5
TENANTS = [f"fair-{number}" for number in range(20)]
JOBS_EACH = 4
TOKENS = 16
ANSWER_S = 120.0
_names = count(1)


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        home=tmp_path_factory.mktemp("fair"), router=True, settler=True, orderly=False, prompts=IN_WORDS
    )
    with running_stack(options) as stack:
        yield stack


async def test_a_flood_of_one_tenant_refuses_nobody_else_and_moves_their_slowest_jobs_little(fair: Stack) -> None:
    ratio, _ = await burst.measure(fair, SECONDS, print)
    assert ratio.value <= RATIO_MAX


async def test_the_same_with_two_routers(fair: Stack) -> None:
    second = await asyncio.to_thread(fair.start, "router-2", Role.ROUTER)
    try:
        ratio, _ = await burst.measure(fair, SECONDS, print)
    finally:
        await asyncio.to_thread(second.stop)
    assert ratio.value <= RATIO_MAX


async def test_twenty_tenants_on_four_slots_are_each_served(fair: Stack) -> None:
    """All at once, each with an adapter of its own: nobody starves, and nobody is far ahead."""
    for tenant in TENANTS:
        await asyncio.to_thread(fair.add_tenant, tenant)
    engine: EngineSettings = burst.ENGINE.model_copy(update={"rows": 8})
    pool = f"fair-{next(_names)}"
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(make_world_on(fair, pool, dict.fromkeys(TENANTS, ("a",))))
        worker = await start_served(fair, "worker-fair", engine, pool)
        opened.push_async_callback(asyncio.to_thread, worker.stop)
        clients = [await opened.enter_async_context(JobClient(fair.kafka(name), name)) for name in TENANTS]
        jobs = [
            await client.submit(
                alias="a", prompt="Go on.", job_class=JobClass.BATCH, parameters=Parameters(max_tokens=TOKENS)
            )
            for _ in range(JOBS_EACH)
            for client in clients
        ]
        async with asyncio.timeout(ANSWER_S):
            replies = [await job.result() for job in jobs]
    assert all(isinstance(reply, JobCompleted) for reply in replies)


async def test_a_demanding_tenant_moves_to_a_pool_of_its_own_under_load_and_loses_no_job(fair: Stack) -> None:
    """Its topics and aliases stay as they are; so does everything of its neighbour."""
    names, pool, own = ("moving", "staying"), f"fair-{next(_names)}", f"own-{next(_names)}"
    for name in names:
        await asyncio.to_thread(fair.add_tenant, name)
    async with AsyncExitStack() as opened:
        limits: dict[str, object] = {"concurrency_max": 1000}
        world = await opened.enter_async_context(make_world_on(fair, pool, dict.fromkeys(names, ("a", "b")), limits))
        await started(opened, fair, "worker-shared", pool)
        clients = [await opened.enter_async_context(JobClient(fair.kafka(name), name)) for name in names]
        before = await submitted(clients, 60)
        await asyncio.to_thread(Provisioner(fair.kafka("admin")).add_pool, own)
        await world.append([pool_of(world.base.base, own, tenants=("moving",))])
        during = await submitted(clients, 60)
        await started(opened, fair, "worker-own", own)
        after = await submitted(clients, 60)
        async with asyncio.timeout(ANSWER_S):
            replies = [await job.result() for job in (*before, *during, *after)]
        assert all(isinstance(reply, JobCompleted) for reply in replies)
        assert len({reply.job_id for reply in replies}) == len(replies)
        moved = [RequestRouted.decode(record.value).route for record in await world.read(REQUESTS.of(own))]
        assert {route.identity.tenant for route in moved} == {"moving"}
        assert len(moved) >= len(after) // 2


async def started(opened: AsyncExitStack, stack: Stack, name: str, pool: str) -> None:
    worker = await start_served(stack, name, burst.ENGINE, pool)
    opened.push_async_callback(asyncio.to_thread, worker.stop)


async def submitted(clients: list[JobClient], jobs: int) -> list[Job]:
    """Jobs of both classes and both adapters, of every client in turn."""
    return [
        await client.submit(
            alias="ab"[number % 2],
            prompt="Go on.",
            job_class=JobClass.BATCH if number % 3 else JobClass.INTERACTIVE,
            parameters=Parameters(max_tokens=TOKENS),
        )
        for number in range(jobs // len(clients))
        for client in clients
    ]
