"""The worker process on a real Kafka and Redis, fed with signed routes as a router writes them."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from infra.clock import SystemClock
from infra.keys import make_key
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.redis import connect
from infra.settings import EngineSettings
from ledger.store import Ledger
from schemas.adapters import AdapterRevoked
from schemas.audit import AdapterEvicted, Started
from schemas.jobs import Outcome, RequestCancelled
from schemas.keys import KeyRevoked, KeyRole
from schemas.replies import JobCompleted, JobFailed
from schemas.topics import ADAPTERS, CANCELS, KEYS, REQUESTS
from tests.factories import make_job
from tests.routes import changed, make_route
from tests.workbench import WAIT_S, Bench, bench_on
from tests.world import PARTITIONS, World

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

FAKE = EngineSettings(kind="fake", slots=2, rows=8, step_ms=10)
SLOW = EngineSettings(kind="fake", slots=2, rows=8, step_ms=60)
Tenants = Callable[[], str]
Workers = Callable[[World, EngineSettings], Process]


@pytest.fixture
def worker(stack: Stack) -> Iterator[Workers]:
    started: list[Process] = []

    def start(world: World, engine: EngineSettings = FAKE) -> Process:
        process = stack.start_engine(f"worker-{world.pool}-{len(started)}", engine=engine, pool=world.pool)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


async def started(worker: Workers, bench: Bench, engine: EngineSettings = FAKE) -> Process:
    return await asyncio.to_thread(worker, bench.world, engine)


def marker(digest: str) -> str:
    return f"«{digest.removeprefix('sha256:')[:8]}»"


async def test_each_job_runs_under_its_own_adapter_and_ends_once(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant(), tenant()]) as bench:
        await started(worker, bench)
        for name in bench.tenants:
            for alias in ("a", "b", "c", "base"):
                await bench.submit(name, alias, jobs=3)
        for reply in await bench.finished(24):
            assert isinstance(reply, JobCompleted)
            assert reply.text.startswith(marker(reply.receipt.identity.adapter))
        identities = {r.job_id: r.receipt.identity for r in await bench.replies()}
        assert all(identities[u.job_id] == u.identity for u in await bench.usage())
        begun = [r for r in await bench.audit() if isinstance(r, Started) and r.job_id in identities]
        assert {r.job_id: r.identity for r in begun} == identities


async def test_the_stream_is_the_reply_in_pieces(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench)
        await bench.submit(bench.tenants[0], "a", tokens=40)
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobCompleted)
        chunks = await bench.chunks()
        assert "".join(chunk.text for chunk in chunks) == reply.text
        assert [chunk.seq for chunk in chunks] == list(range(reply.chunks))
        assert sum(chunk.tokens for chunk in chunks) == reply.usage.completion_tokens == 40


async def test_after_kill_9_in_mid_stream_every_job_still_ends_once(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        first = await started(worker, bench, SLOW)
        await bench.submit(bench.tenants[0], "a", tokens=60, jobs=8)
        await bench.submit(bench.tenants[0], "b", tokens=60, jobs=8)

        async def streaming() -> bool:
            return len(await bench.chunks()) > 20

        await bench.until(streaming)
        first.kill()
        await started(worker, bench)
        replies = await bench.finished(16)
        assert {type(reply) for reply in replies} == {JobCompleted}
        again = [reply for reply in replies if reply.receipt.attempt == 2]
        assert again, "some job was interrupted and ran again"
        chunks = await bench.chunks()
        for reply in replies:
            last = [c.text for c in chunks if c.job_id == reply.job_id and c.attempt == reply.receipt.attempt]
            assert "".join(last) == reply.text


@pytest.mark.parametrize("step", ["begun", "started", "streamed@5", "ending", "ended"])
async def test_killed_between_any_two_steps_every_job_still_ends_once(stack: Stack, tenant: Tenants, step: str) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        name, pool = f"worker-{bench.world.pool}", bench.world.pool
        armed = await asyncio.to_thread(
            stack.start_engine, name, engine=FAKE, pool=pool, env={"SWITCHYARD_FAILPOINT": step}
        )
        await bench.submit(bench.tenants[0], "a", jobs=3)
        await bench.submit(bench.tenants[0], "b", jobs=3)
        assert await asyncio.to_thread(armed.wait_exit, WAIT_S) == -signal.SIGKILL
        again = await asyncio.to_thread(stack.start_engine, f"{name}-again", engine=FAKE, pool=pool)
        replies = await bench.finished(6)
        assert {type(reply) for reply in replies} == {JobCompleted}
        again.kill()


async def test_an_orderly_stop_hands_over_without_a_crash(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        first = await started(worker, bench, SLOW)
        await bench.submit(bench.tenants[0], "a", tokens=30, jobs=12)

        async def streaming() -> bool:
            return len(await bench.chunks()) > 5

        await bench.until(streaming)
        first.signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait_exit, 60) == 0
        ended = len(await bench.replies())
        assert ended >= 8, "what ran was let end"
        await started(worker, bench)
        replies = await bench.finished(12)
        assert {reply.receipt.attempt for reply in replies} == {1}


async def test_a_copy_at_another_offset_is_neither_executed_nor_answered(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench)
        (request,) = await bench.submit(bench.tenants[0], "a")
        for _ in range(20):
            await bench.route(request)
        await bench.submit(bench.tenants[0], "a", jobs=3)
        assert len(await bench.finished(4)) == 4
        runs = [r for r in await bench.audit() if isinstance(r, Started) and r.job_id == request.job.job_id]
        assert len(runs) == 1


async def test_what_no_router_wrote_here_is_a_dead_letter_with_its_reason(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench)
        good = await bench.admit(bench.tenants[0], make_job(alias="a"))
        other = bench.world.digests[bench.tenants[0], "b"]
        stranger = make_route(bench.world.registry, make_job(alias="a"), tenant=bench.tenants[0], pool=bench.world.pool)
        await bench.route(changed(good, {"expires_at_ms": 2**43}))
        await bench.route(stranger)
        await bench.route(good, key=other)
        await bench.route(good, partition=(good.route.partition + 1) % PARTITIONS)
        await bench.route(good.model_copy(update={"job": make_job(job_id=good.job.job_id, alias="a", prompt="other")}))
        await bench.world.publisher.publish(REQUESTS.of(bench.world.pool), other, good.job, partition=0)
        await bench.route(good)
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobCompleted)

        async def told() -> bool:
            return len(await bench.letters()) == 6

        await bench.until(told)
        assert Counter(await bench.letters()) == {
            "signature": 2, "key": 1, "partition": 1, "body": 1, "invalid_record": 1
        }  # fmt: skip


async def test_a_route_signed_by_a_revoked_key_is_never_executed(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        name, (key, published) = bench.tenants[0], make_key(KeyRole.ROUTE, 901)
        route = partial(make_route, bench.world.registry, make_job(alias="a"), name, bench.world.pool, key, PARTITIONS)
        await bench.world.append(
            [
                (KEYS.name, key.key_id, published),
                (KEYS.name, key.key_id, KeyRevoked(key_id=key.key_id, reason="a test")),
                (KEYS.name, key.key_id, published),
            ]
        )
        await started(worker, bench)
        await bench.route(route())
        await bench.route(await bench.admit(name, make_job(alias="a")))
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobCompleted)

        async def told() -> bool:
            return await bench.letters() == ["signature"]

        await bench.until(told)


async def test_an_expired_job_ends_expired_without_a_token(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        now_ms = SystemClock().now_ms()
        request = await bench.admit(bench.tenants[0], make_job(alias="a"), expires_at_ms=now_ms + 2_000)
        await bench.route(request)
        await asyncio.sleep(2)
        await started(worker, bench)
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobFailed)
        assert (reply.outcome, reply.usage.completion_tokens) == (Outcome.EXPIRED, 0)


async def test_a_running_job_ends_at_its_deadline_with_what_it_had(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench, SLOW)
        now_ms = SystemClock().now_ms()
        await bench.submit(bench.tenants[0], "a", tokens=64, expires_at_ms=now_ms + 3_000)
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobFailed)
        assert reply.outcome is Outcome.EXPIRED
        assert 0 < reply.usage.completion_tokens < 64


async def test_cancelled_jobs_end_at_once_running_or_waiting(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench, EngineSettings(kind="fake", slots=2, rows=1, step_ms=100))
        requests = await bench.submit(bench.tenants[0], "a", tokens=60, jobs=2)

        async def streaming() -> bool:
            return bool(await bench.chunks())

        await bench.until(streaming)
        for request in requests:
            await bench.ledger.cancel(bench.tenants[0], request.job.job_id)
            record = RequestCancelled(
                identity=request.route.identity, job_id=request.job.job_id, ingress=request.route.ingress
            )
            await bench.world.publisher.publish(CANCELS.of(bench.world.pool), request.job.job_id, record)
        replies = await bench.finished(2)
        assert {r.outcome for r in replies if isinstance(r, JobFailed)} == {Outcome.CANCELLED}
        assert sorted(r.usage.completion_tokens > 0 for r in replies) == [False, True]


async def test_a_revoked_adapter_stops_within_its_bound_and_leaves_the_engine(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await started(worker, bench, EngineSettings(kind="fake", slots=2, rows=2, step_ms=100))
        digest = bench.world.digests[bench.tenants[0], "a"]
        await bench.submit(bench.tenants[0], "a", tokens=64, jobs=4)
        await bench.submit(bench.tenants[0], "b", tokens=4, jobs=1)

        async def streaming() -> bool:
            return bool(await bench.chunks())

        await bench.until(streaming)
        record = AdapterRevoked(adapter=digest, reason="test", revoked_by="test")
        await bench.world.append([(ADAPTERS.name, digest, record)])
        late = await bench.admit(bench.tenants[0], make_job(alias="a"))
        await bench.route(late)
        replies = await bench.finished(6)
        outcomes = Counter(r.outcome for r in replies if isinstance(r, JobFailed))
        assert outcomes == {Outcome.REVOKED: 5}

        async def gone() -> bool:
            records = await bench.audit()
            return any(isinstance(r, AdapterEvicted) and r.adapter == digest for r in records)

        await bench.until(gone)


async def test_a_suspect_is_a_dead_letter_after_its_third_crash(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        request = await bench.admit(bench.tenants[0], make_job(alias="a"))
        place = await bench.route(request)
        ledger = Ledger(connect(stack.redis("worker")))
        for epoch in range(3):
            await ledger.begin(bench.tenants[0], request.job.job_id, place, f"1.{epoch}")
        await ledger.close()
        await started(worker, bench)
        (reply,) = await bench.finished(1)
        assert isinstance(reply, JobFailed)
        assert (reply.outcome, reply.code) == (Outcome.FAILED, "poison")
        assert await bench.letters() == ["poison"]
