"""Records: what is forged, copied or claimed in a record has no effect beyond its own refusal."""

import asyncio

import pytest

from infra.clock import SystemClock
from infra.kafka.records import Incoming
from schemas.audit import Finished, Impersonated, Rejected, Started
from schemas.digest import digest_of
from schemas.jobs import Outcome, RejectReason
from schemas.keys import KeyRole
from schemas.replies import JobCompleted, JobFailed, JobRejected
from schemas.signing import SigningKey
from schemas.topics import DLQ, DLQ_OFFSET, DLQ_REASON, DLQ_TOPIC, REQUESTS
from tests.factories import make_grant, make_job
from tests.isolation.house import CANARY, NORTH, POOL, SOUTH, House
from tests.isolation.notes import Note
from tests.routes import make_route
from tests.world import PARTITIONS

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def letter_for(house: House, offset: int, partition: int) -> str:
    """The dead letter made of one record of the pool's requests, waited for; its reason."""
    found: list[Incoming] = []

    async def there() -> bool:
        letters = [
            r for r in await house.world.read(DLQ.name) if dict(r.headers)[DLQ_TOPIC] == REQUESTS.of(POOL).encode()
        ]
        found[:] = [r for r in letters if dict(r.headers)[DLQ_OFFSET] == str(offset).encode()]
        return bool(found)

    await house.until(there)
    reason = (dict(found[0].headers)[DLQ_REASON] or b"").decode()
    return f"dead letter ({reason}) of {REQUESTS.of(POOL)}/{partition}/{offset} at {found[0].coordinates}"


async def test_the_wrong_base(house: House, note: Note) -> None:
    job = make_job(alias="a", prompt=CANARY)
    base = digest_of(b"another base")
    identity = make_route(house.world.registry, job, NORTH, POOL).route.identity.model_copy(update={"base": base})
    key = house.world.key(KeyRole.ROUTE)
    request = make_route(house.world.registry, job, NORTH, POOL, key, PARTITIONS, identity=identity)
    await house.world.publisher.publish(REQUESTS.of(POOL), identity.adapter, request, partition=request.route.partition)
    reply = await house.reply_to(NORTH, job.job_id)
    assert isinstance(reply, JobFailed)
    assert (reply.outcome, reply.code, reply.text, reply.usage.completion_tokens) == (
        Outcome.FAILED,
        "wrong_base",
        "",
        0,
    )
    proof = await house.proof(Finished, job_id=job.job_id, outcome=Outcome.FAILED)
    assert not await house.audit(Started, job_id=job.job_id)
    note("wrong base: an authentic route for another base", "failed before loading, zero usage", proof)


async def test_a_forged_context(house: House, note: Note) -> None:
    claimed = make_job(alias="a", prompt=CANARY, tenant=NORTH)
    await house.post_job(SOUTH, claimed)
    reply = await house.reply_to(SOUTH, claimed.job_id)
    assert isinstance(reply, JobRejected)
    assert reply.reason is RejectReason.TENANT_MISMATCH
    proof = await house.proof(Rejected, job_id=claimed.job_id)
    job = make_job(alias="a", prompt=CANARY)
    forger = SigningKey.generate("route-1", KeyRole.ROUTE)
    request = make_route(house.world.registry, job, NORTH, POOL, forger, PARTITIONS)
    where = await house.world.publisher.publish(
        REQUESTS.of(POOL), request.route.identity.adapter, request, partition=request.route.partition
    )
    letter = await letter_for(house, where.offset, where.partition)
    assert not await house.audit(Started, job_id=job.job_id)
    note(
        "forged context: north's name in south's record; a route signed by a stranger",
        "refused; dead letter, never executed",
        f"{proof}; {letter}",
    )


async def test_impersonation_without_a_grant(house: House, note: Note) -> None:
    """South takes north's grant, writes one for itself, and signs one with a key that bears the admin's name."""
    now_ms = SystemClock().now_ms()
    stranger = SigningKey.generate("admin-1", KeyRole.ADMIN)
    for grant in (
        make_grant(NORTH, now_ms, key=house.world.key(KeyRole.ADMIN)),
        make_grant(SOUTH, now_ms, key=stranger),
        make_grant(SOUTH, now_ms, key=house.world.key(KeyRole.GATE)),
    ):
        for alias in ("a", "north-secret"):
            job = make_job(alias=alias, prompt=CANARY, impersonation=grant)
            await house.post_job(SOUTH, job)
            reply = await house.reply_to(SOUTH, job.job_id)
            assert isinstance(reply, JobRejected)
            assert reply.reason is RejectReason.IMPERSONATION
            assert NORTH not in reply.message
            proof = await house.proof(Rejected, job_id=job.job_id, reason=RejectReason.IMPERSONATION)
            assert not await house.routes(job.job_id)
            assert not await house.audit(Impersonated, job_id=job.job_id)
    note(
        "impersonation without a grant: north's grant, one signed by a stranger, one by the gate's key",
        "refused before any alias is looked up",
        proof,
    )


async def test_a_replayed_record(house: House, note: Note) -> None:
    reply = await house.right(NORTH, "a")
    ((_, first),) = await house.routes(reply.job_id)
    request = (await house.routes(reply.job_id))[0][0]
    await house.world.publisher.publish(
        REQUESTS.of(POOL), request.route.identity.adapter, request, partition=first.partition
    )
    # What comes after it on the same partition is answered: the copy was passed over by then.
    await house.right(NORTH, "a")
    assert len(await house.replies_to(NORTH, reply.job_id)) == 1
    started = await house.audit(Started, job_id=reply.job_id)
    assert len(started) == 1
    note(
        "replayed record: an authentic route at a second offset", "never executed, never answered", f"one {started[0]}"
    )


async def test_headers_set_by_the_client(house: House, note: Note) -> None:
    stranger = house.digest(NORTH, "a").encode()
    named = [
        ("adapter", stranger),
        ("digest", stranger),
        ("tenant", NORTH.encode()),
        ("route", b"{}"),
        ("ce_subject", stranger),
    ]
    headers = [(spelling(name), value) for name, value in named for spelling in (str.lower, str.upper, str.title)]
    job = make_job(alias="a", prompt=CANARY, tokens_max=8)
    await house.post_job(SOUTH, job, headers)
    reply = await house.reply_to(SOUTH, job.job_id)
    house.check(reply, SOUTH, "a", 8)
    proof = await house.proof(Finished, job_id=job.job_id)
    assert proof.where.key == house.digest(SOUTH, "a").encode()
    note("headers set by the client: adapter, digest, tenant, route, ce_subject", "ignored: south's own adapter", proof)


async def test_another_tenants_job_id(house: House, note: Note) -> None:
    job = await house.clients[NORTH].submit(alias="a", prompt=CANARY, parameters=make_job(tokens_max=60).parameters)
    async for _ in job:
        await house.clients[SOUTH].cancel(job.job_id)
        break
    same = make_job(job.job_id, alias="a", prompt=CANARY, tokens_max=8)
    await house.post_job(SOUTH, same)
    other = await house.reply_to(SOUTH, job.job_id)
    async with asyncio.timeout(60):
        reply = await job.result()
    house.check(reply, NORTH, "a", 60)
    assert isinstance(other, JobCompleted | JobRejected)
    if isinstance(other, JobRejected):
        # South took back its own job of that id before it came: that, and nothing of north's.
        assert other.reason is RejectReason.CANCELLED
    proof = await house.proof(Finished, job_id=job.job_id, tenant=NORTH)
    note("another tenant's job id: south cancels it and uses it", "north's job runs to its end", proof)
