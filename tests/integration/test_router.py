"""The router process on a real Kafka and Redis, fed by foreign clients."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from infra.launch.stack import Stack
from infra.redis import connect
from ledger.answers import Used
from ledger.rebuild import Gate, rebuild
from schemas.audit import AUDIT_RECORDS, Admitted, CancelRequested, Rejected, WriterClosed
from schemas.jobs import JobCancelled, JobClass, RejectReason, RequestRouted
from schemas.keys import KeyRole
from schemas.record import decode_one_of
from schemas.signing import verify
from schemas.topics import DLQ_REASON
from tests.factories import configured, make_job
from tests.routing import Routing, routing_on, until

Tenants = Callable[[], str]
pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_job_is_routed_under_its_own_digest_and_signed(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        await routing.start()
        job = make_job(alias="a")
        await routing.jobs(job)
        await routing.drained()
        ((request, record),) = await routing.routed()
        route, world = request.route, routing.world
        verify(route, request.signature, route.key_id, KeyRole.ROUTE, world.registry.keys(KeyRole.ROUTE))
        assert record.key == route.identity.adapter.encode() == world.digests[routing.tenant, "a"].encode()
        assert record.partition == route.partition
        assert (request.job, route.body_hash, route.identity.tenant) == (job, job.body_hash, routing.tenant)
        (admitted,) = [r for r in await routing.audit() if isinstance(r, Admitted)]
        assert (admitted.identity, admitted.ingress) == (route.identity, route.ingress)


async def test_anothers_alias_is_refused_like_an_unknown_one(stack: Stack, tenant: Tenants) -> None:
    mine, other = tenant(), tenant()
    async with routing_on(stack, [mine, other]) as routing:
        await routing.world.append([configured(other, tokens_max=100)])
        await routing.start()
        await routing.jobs(make_job(alias="secret"), make_job(alias="../a"), make_job(alias="a", tenant=other))
        await routing.drained()
        foreign, path, claimed = await routing.rejected()
        assert (foreign.reason, foreign.message) == (path.reason, path.message)
        assert foreign.reason is RejectReason.UNKNOWN_ALIAS
        assert claimed.reason is RejectReason.TENANT_MISMATCH
        assert await routing.routed() == []


async def test_a_thousand_broken_records_cost_only_themselves(stack: Stack, tenant: Tenants) -> None:
    broken = (b"{", b"\xff\xfe", b"[]", b'{"job_id": "torn", "alias": 5}', b"[" * 5000)
    async with routing_on(stack, [tenant()]) as routing:
        await routing.start()
        good = [make_job(alias="a") for _ in range(50)]
        for job in good:
            await routing.jobs(*broken * 4, job)
        await routing.drained()
        assert Counter(request.route.job_id for request, _ in await routing.routed()) == {j.job_id: 1 for j in good}
        letters, replies = await routing.letters(), await routing.rejected()
        assert len(letters) == len(replies) == 1000
        assert {dict(letter.headers)[DLQ_REASON] for letter in letters} == {b"invalid_record"}
        assert {letter.value for letter in letters} == set(broken)
        assert {reply.job_id for reply in replies} == {None, "torn"}
        assert all(reply.message and not reply.retryable for reply in replies)


async def test_the_same_job_posted_again_is_one_job_and_another_body_is_refused(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        await routing.start()
        job = make_job(alias="a")
        refused = make_job(alias="nothing")
        await routing.jobs(job, job, make_job(job.job_id, alias="b"), refused)
        await routing.jobs(job, refused)
        await routing.drained()
        assert len(await routing.routed()) == 1
        reused, first, second = await routing.rejected()
        assert (reused.reason, reused.job_id) == (RejectReason.JOB_ID_REUSED, job.job_id)
        assert (first.reason, first.message) == (second.reason, second.message)
        assert first.ingress != second.ingress
        assert len([r for r in await routing.audit() if isinstance(r, Admitted)]) == 1
        assert {r.ingress for r in await routing.audit() if isinstance(r, Rejected)} == {
            reused.ingress, first.ingress, second.ingress
        }  # fmt: skip


async def test_interactive_jobs_are_refused_when_full_and_batch_jobs_wait(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()], limits={"concurrency_max": 3}) as routing:
        await routing.start()
        waiting = [make_job(alias="a") for _ in range(8)]
        await routing.post("batch", *waiting)
        await until(lambda: held(routing, 3))
        await routing.jobs(make_job(alias="b"), make_job(alias="nothing"))
        await routing.cancel("never-posted")
        await until(lambda: answered(routing, 2))
        full, unknown = await routing.rejected()
        assert (full.reason, full.retryable, unknown.retryable) == (RejectReason.CONCURRENCY, True, False)
        assert full.retry_after_ms
        assert [r.job_id for r in await routing.audit() if isinstance(r, CancelRequested)] == ["never-posted"]
        for round_ in range(1, 9):
            await settle_one(routing)
            await until(partial(at_least, routing, min(8, 3 + round_)))
        await routing.drained()
        assert Counter(r.route.job_id for r, _ in await routing.routed()) == {job.job_id: 1 for job in waiting}
        assert {r.route.job_class for r, _ in await routing.routed()} == {JobClass.BATCH}


async def test_a_job_without_a_worker_waits_or_is_refused_until_one_is_ready(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()], rows=0) as routing:
        await routing.start()
        job = make_job(alias="a")
        await routing.post("batch", job)
        await routing.jobs(make_job(alias="a"))
        await until(lambda: answered(routing, 1))
        assert [reply.reason for reply in await routing.rejected()] == [RejectReason.NOT_READY]
        assert await routing.routed() == []
        await routing.serve(rows=1)
        await routing.drained()
        assert await routing.routed_ids() == {job.job_id}


async def test_a_cancellation_that_comes_before_its_job_wins(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        await routing.start()
        early, late = make_job(alias="a"), make_job(alias="a")
        await routing.cancel(early.job_id)
        await routing.drained()
        await routing.jobs(early, late)
        await routing.drained()
        await routing.cancel(late.job_id)
        await routing.post("cancel", b"nonsense", JobCancelled(job_id=late.job_id, tenant="another"))
        await routing.drained()
        (reply,) = await routing.rejected()
        assert (reply.job_id, reply.reason) == (early.job_id, RejectReason.CANCELLED)
        ((request, _),) = await routing.routed()
        (cancelled,) = await routing.cancelled()
        assert (cancelled.job_id, cancelled.identity) == (late.job_id, request.route.identity)
        found = {r.job_id: r.identity for r in await routing.audit() if isinstance(r, CancelRequested)}
        assert found == {early.job_id: None, late.job_id: request.route.identity}
        assert len(await routing.letters()) == 2


async def test_a_closed_ledger_refuses_or_holds_and_goes_on_once_it_was_rebuilt(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        await routing.start()
        admin = connect(stack.redis("admin"))
        await Gate(admin).raise_epoch()
        batch = make_job(alias="a")
        await routing.post("batch", batch)
        await routing.jobs(make_job(alias="a"), b"broken")
        await routing.cancel("later")
        await until(lambda: answered(routing, 2))
        closed, broken = await routing.rejected()
        assert (closed.reason, closed.retryable) == (RejectReason.NOT_READY, True)
        assert broken.reason is RejectReason.INVALID_RECORD
        assert await routing.routed() == []
        await rebuild(stack.kafka("admin"), admin)
        await admin.aclose()
        await routing.drained()
        assert await routing.routed_ids() == {batch.job_id}
        assert [r.job_id for r in await routing.audit() if isinstance(r, CancelRequested)] == ["later"]


async def test_told_to_stop_it_finishes_the_turn_in_hand_and_closes_its_audit(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        first = await routing.start()
        jobs = [make_job(alias="a") for _ in range(300)]
        await routing.jobs(*jobs)
        await until(lambda: at_least(routing, 1))
        first.signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait_exit, 20) == 0
        await routing.start()
        await routing.drained()
        assert Counter(r.route.job_id for r, _ in await routing.routed()) == {job.job_id: 1 for job in jobs}
        records = [decode_one_of(AUDIT_RECORDS, r.value) for r in await routing.world.read("audit")]
        writers = {r.writer for r in records if isinstance(r, Admitted) and r.identity.tenant == routing.tenant}
        assert writers & {r.writer for r in records if isinstance(r, WriterClosed)}


async def test_a_flood_of_one_tenant_does_not_hold_up_another(stack: Stack, tenant: Tenants) -> None:
    async with routing_on(stack, [tenant(), tenant()], rows=10_000) as routing:
        flooding, calm = routing.tenants
        await routing.jobs(*[make_job(alias="a") for _ in range(5_000)], tenant=flooding)
        await routing.start()
        await until(lambda: at_least(routing, 100))
        job = make_job(alias="b")
        await routing.jobs(job, tenant=calm)
        await until(lambda: is_routed(routing, job.job_id))
        assert len(await routing.routed()) < 5_000
        await routing.drained()
        assert len(await routing.routed_ids()) == 5_001


STEPS = ("admit", "admitted", "routed", "replies", "commit", "routed@2", "admitted@3")


@pytest.mark.parametrize("step", STEPS)
async def test_killed_between_any_two_steps_nothing_is_lost_and_nothing_is_answered_twice(
    stack: Stack, tenant: Tenants, step: str
) -> None:
    async with routing_on(stack, [tenant()]) as routing:
        armed = await routing.start(step)
        good = [make_job(alias=alias) for alias in "ab" * 6]
        early, unknown, batch = make_job(alias="a"), [make_job(alias="none") for _ in range(4)], make_job(alias="b")
        await routing.cancel(early.job_id)
        await routing.jobs(*good[:6], *unknown, b"{", b"}")
        await routing.post("batch", batch)
        await routing.jobs(*good[6:])
        for job in good:
            # Something to do at every step until it is dead: each one is a turn of its own.
            if armed.exit_code() is not None:
                break
            await routing.cancel(job.job_id)
            await asyncio.sleep(0.2)
        assert armed.wait_exit(20) == -9
        await routing.start()
        await routing.jobs(early)
        await routing.drained()
        await check_one_answer_each(routing, {job.job_id for job in [*good, batch]}, refused=7, letters=2)


async def check_one_answer_each(routing: Routing, admitted: set[str], refused: int, letters: int) -> None:
    """Copies of a route have the same bytes, refusals are answered once, and every answer is in the audit."""
    copies: dict[str, set[bytes]] = {}
    for request, record in await routing.routed():
        copies.setdefault(request.route.job_id, set()).add(record.value or b"")
    assert copies.keys() == admitted
    assert {len(found) for found in copies.values()} == {1}
    replies = await routing.rejected()
    assert len(replies) == len({str(reply.ingress) for reply in replies}) == refused
    assert len(await routing.letters()) == letters
    audit = await routing.audit()
    assert {r.job_id for r in audit if isinstance(r, Admitted)} == admitted
    assert {r.ingress for r in audit if isinstance(r, Rejected)} == {reply.ingress for reply in replies}
    routes = {
        found.route.job_id: found.route for values in copies.values() for found in map(RequestRouted.decode, values)
    }
    assert all(routes[r.job_id].identity == r.identity for r in audit if isinstance(r, Admitted))


async def held(routing: Routing, leases: int) -> bool:
    return (await routing.ledger.status()).tenants.get(routing.tenant, 0) == leases


async def answered(routing: Routing, replies: int) -> bool:
    return len(await routing.rejected()) >= replies


async def at_least(routing: Routing, routes: int) -> bool:
    return len(await routing.routed_ids()) >= routes


async def is_routed(routing: Routing, job_id: str) -> bool:
    return job_id in await routing.routed_ids()


async def settle_one(routing: Routing) -> None:
    """End the lease of one job that still holds one, as the settler does."""
    for request, _ in await routing.routed():
        route = request.route
        tenant = route.identity.tenant
        before = await routing.ledger.status()
        await routing.ledger.settle(tenant, route.job_id, route.ingress, Used())
        if (await routing.ledger.status()).tenants.get(tenant, 0) < before.tenants.get(tenant, 0):
            return
