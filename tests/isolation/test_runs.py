"""Runs: what changes while a job runs does not change the job."""

import asyncio
import random

import pytest

from consumers.worker.replies import cache_salt
from infra.kafka.tail import end_offsets
from schemas.adapters import AliasPointed
from schemas.audit import AdapterLoaded, Admitted, Finished, Started
from schemas.digest import digest_of
from schemas.jobs import JobClass, Outcome, Parameters
from schemas.record import Identity
from schemas.replies import JobCompleted, JobFailed
from schemas.topics import ALIASES
from tests.isolation.house import CANARY, NORTH, SOUTH, House
from tests.isolation.notes import Note

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_an_alias_moved_in_mid_run(house: House, note: Note) -> None:
    job = await house.clients[NORTH].submit(alias="a", prompt=CANARY, parameters=Parameters(max_tokens=60))
    async for _ in job:
        moved = AliasPointed(
            tenant=NORTH, alias="a", stable=house.digest(NORTH, "b"), alias_version=2, pointed_by="tests"
        )
        await house.world.append([(ALIASES.name, f"{NORTH}/a", moved)])
        break
    async with asyncio.timeout(60):
        reply = await job.result()
    house.check(reply, NORTH, "a", 60)

    async def followed() -> bool:
        later = await house.ask(NORTH, "a")
        return isinstance(later, JobCompleted) and later.receipt.identity.adapter == house.digest(NORTH, "b")

    await house.until(followed)
    back = AliasPointed(tenant=NORTH, alias="a", stable=house.digest(NORTH, "a"), alias_version=3, pointed_by="tests")
    await house.world.append([(ALIASES.name, f"{NORTH}/a", back)])

    async def returned() -> bool:
        later = await house.ask(NORTH, "a")
        return isinstance(later, JobCompleted) and later.receipt.identity.adapter == house.digest(NORTH, "a")

    await house.until(returned)
    proof = await house.proof(Finished, job_id=job.job_id)
    note("alias moved in mid-run", "the job ends under the digest it began with; the next one moves", proof)


async def test_a_cache_salt_collision(house: House, note: Note) -> None:
    """The platform's own adapter is shared by both tenants, and so is every word of the prompt."""
    longest = " ".join(f"{CANARY}-{number}" for number in range(80))
    replies = []
    for tenant in (NORTH, NORTH, SOUTH, SOUTH):
        job = await house.clients[tenant].submit(
            alias="base", prompt=longest, job_class=JobClass.BATCH, parameters=Parameters(max_tokens=4)
        )
        async with asyncio.timeout(60):
            replies.append(await job.result())
    cached = [reply.usage.cached_tokens for reply in replies if isinstance(reply, JobCompleted)]
    assert cached == [0, 64, 0, 64]
    # Names that read the same when they are only joined.
    digests = [digest_of(name) for name in (b"base", b"adapter", b"tokenizer")]
    salts = {
        cache_salt(b"k", Identity(tenant=tenant, base=digests[0], adapter=digests[1], tokenizer=digests[2]), epoch)
        for tenant, epoch in (("a", 11), ("a1", 1), ("a-1", 1), ("a", 1))
    }
    assert len(salts) == 4
    proof = await house.proof(Finished, job_id=replies[2].job_id)
    note("cache-salt collision: same adapter, same prompt, joined names", "no cached token across tenants", proof)


async def test_concurrent_adapter_switching(house: House, note: Note) -> None:
    names = [(tenant, alias) for tenant in (NORTH, SOUTH) for alias in ("a", "b", f"{tenant}-secret", "base")]
    order = random.Random(3).choices(names, k=80)
    before = len(await house.audit(AdapterLoaded))
    replies = await asyncio.gather(*(house.ask(tenant, alias, 4 + n % 9) for n, (tenant, alias) in enumerate(order)))
    for number, ((tenant, alias), reply) in enumerate(zip(order, replies, strict=True)):
        house.check(reply, tenant, alias, 4 + number % 9)
    loads = len(await house.audit(AdapterLoaded)) - before
    assert loads >= len(set(names)) - 2
    proof = await house.proof(Finished, job_id=replies[-1].job_id)
    note(
        "concurrent adapter switching: 80 jobs, 7 adapters, 2 slots",
        f"every answer is its own adapter's ({loads} loads)",
        proof,
    )


async def test_a_cancel_in_mid_run(house: House, note: Note) -> None:
    jobs = [
        await house.clients[tenant].submit(alias="a", prompt=CANARY, parameters=Parameters(max_tokens=60))
        for tenant in (NORTH, SOUTH, NORTH, SOUTH)
    ]
    async for _ in jobs[0]:
        await jobs[0].cancel()
        break
    async with asyncio.timeout(60):
        first, *others = [await job.result() for job in jobs]
    assert isinstance(first, JobFailed)
    assert first.outcome is Outcome.CANCELLED
    for tenant, reply in zip((SOUTH, NORTH, SOUTH), others, strict=True):
        house.check(reply, tenant, "a", 60)
    proof = await house.proof(Finished, job_id=jobs[0].job_id, outcome=Outcome.CANCELLED)
    note("cancel in mid-run", "that job ends; its neighbours keep every token", proof)


async def test_a_worker_restart(house: House, note: Note) -> None:
    before = sum((await end_offsets(house.stack.kafka("admin"), f"stream.{NORTH}")).values())
    order = [(tenant, alias) for tenant in (NORTH, SOUTH) for alias in ("a", "b")] * 2
    jobs = [
        await house.clients[tenant].submit(
            alias=alias, prompt=CANARY, job_class=JobClass.BATCH, parameters=Parameters(max_tokens=60)
        )
        for tenant, alias in order
    ]

    async def streaming() -> bool:
        return sum((await end_offsets(house.stack.kafka("admin"), f"stream.{NORTH}")).values()) > before + 5

    await house.until(streaming)
    house.stack.processes[house.workers[-1]].kill()
    await house.start_worker()
    async with asyncio.timeout(90):
        replies = [await job.result() for job in jobs]
    for (tenant, alias), reply in zip(order, replies, strict=True):
        house.check(reply, tenant, alias, 60)
    again = max(replies, key=lambda reply: reply.receipt.attempt if isinstance(reply, JobCompleted) else 0)
    await house.proof(Finished, job_id=again.job_id)
    started = await house.audit(Started, job_id=again.job_id)
    admitted = await house.audit(Admitted, job_id=again.job_id)
    assert len(admitted) == 1
    note(
        "worker killed and started again",
        "every job ends once, under its own digest",
        f"{started[-1]} (attempt {len(started)})",
    )
