"""An operator in a tenant's name, from the command line to the audit; and everybody who may not."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.kafka.tail import end_offsets
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.batch_files import State
from producers.client import JobClient
from schemas.audit import AUDIT_RECORDS, Admitted, Impersonated, ImpersonationGranted, Rejected
from schemas.impersonation import Impersonation, SignedImpersonation
from schemas.jobs import JobClass, RejectReason
from schemas.keys import KeyRevoked, KeyRole
from schemas.record import decode_one_of
from schemas.replies import FinalReply, JobCompleted, JobRejected
from schemas.signing import SigningKey
from schemas.topics import AUDIT, BATCH, JOBS, KEYS
from tests.factories import make_grant, make_job, published
from tests.integration.test_batch import Files, line
from tests.integration.test_release_cli import Shell
from tests.members import start_served
from tests.routing import until
from tests.world import World, make_world_on

pytestmark = pytest.mark.timeout(180)

ANSWER_S = 60.0
_numbers = count(1)


@asynccontextmanager
async def two_tenants(whole: Stack) -> AsyncIterator[tuple[World, str, str]]:
    """Both with an adapter `a`, on a pool with a worker."""
    number = next(_numbers)
    one, two = f"acted-{number}", f"other-{number}"
    for name in (one, two):
        await asyncio.to_thread(whole.add_tenant, name)
    worker = f"worker-acted-{number}"
    async with make_world_on(whole, f"acted-{number}", {one: ["a"], two: ["a"]}) as world:
        await start_served(whole, worker, EngineSettings(kind="fake", step_ms=5), world.pool)
        try:
            yield world, one, two
        finally:
            whole.processes[worker].kill()


async def ask(whole: Stack, tenant: str, grant: SignedImpersonation) -> FinalReply:
    """What a router says, where nothing looked at the grant before."""
    async with JobClient(whole.kafka("admin"), tenant) as client:
        job = await client.submit_record(make_job(alias="a", impersonation=grant), JobClass.BATCH)
        async with asyncio.timeout(ANSWER_S):
            return await job.result()


async def audited(world: World, job_id: str | None) -> list[object]:
    """What the audit has of a job, by partition and offset."""
    records = [decode_one_of(AUDIT_RECORDS, record.value) for record in await world.read(AUDIT.name)]
    return [record for record in records if getattr(record, "job_id", None) == job_id]


async def under(world: World, grant: Impersonation) -> list[object]:
    """What the audit has of a grant, by its id and in the order of the broker's time: issued, and used by each job."""
    found = []
    for where in await world.read(AUDIT.name):
        record = decode_one_of(AUDIT_RECORDS, where.value)
        if isinstance(record, ImpersonationGranted | Impersonated) and record.impersonation.grant_id == grant.grant_id:
            assert record.impersonation == grant
            found.append((where.timestamp_ms, record))
    return [record for _, record in sorted(found, key=lambda entry: entry[0])]


async def ends(whole: Stack, tenant: str) -> list[dict[int, int]]:
    return [await end_offsets(whole.kafka("admin"), topic.of(tenant)) for topic in (JOBS, BATCH)]


async def test_an_operator_acts_in_a_tenants_name_and_the_audit_says_who_why_and_until_when(
    whole: Stack, tmp_path: Path
) -> None:
    shell, path = Shell(whole.file.home), tmp_path / "grant.json"
    async with two_tenants(whole) as (world, tenant, other):
        granted = await asyncio.to_thread(
            shell.run, "tenant", "impersonate", tenant, "--reason", "ticket 7", "--for", "10m", "--out", path
        )
        assert (granted.exit_code, f" may act for {tenant} until " in granted.stderr) == (0, True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        grant = SignedImpersonation.model_validate_json(path.read_bytes()).impersonation
        assert grant.expires_at_ms - grant.granted_at_ms == 600_000

        asked = ("job", "run", "--alias", "a", "--max-tokens", 8, "--grant", path, "--json")
        reply = json.loads(await asyncio.to_thread(shell.said, *asked, "--as-tenant", tenant, "Hello?"))
        assert (reply["type"], reply["receipt"]["identity"]["tenant"]) == ("JobCompleted", tenant)
        assert "ticket 7" not in json.dumps(reply)
        digest = world.digests[tenant, "a"]
        assert reply["receipt"]["identity"]["adapter"] == digest

        first, second, *_ = await audited(world, reply["job_id"])
        assert isinstance(second, Admitted)
        assert second.impersonation == grant
        issued, *used = await under(world, grant)
        assert (type(issued), used) == (ImpersonationGranted, [first])

        replayed = await _closed(shell, digest)
        told = next(told for told in replayed if "Impersonated" in told)
        assert f"{tenant}/{reply['job_id']}" in told
        assert f"={grant.grant_id} of {grant.admin!r} until " in told
        assert told.endswith("because 'ticket 7'")

        before = await ends(whole, other)
        refused = await asyncio.to_thread(shell.refused, *asked, "--as-tenant", other, "Hello?")
        assert "nothing was sent: the grant is for another tenant" in refused
        assert await ends(whole, other) == before


async def test_each_line_of_a_batch_in_a_tenants_name_is_told_of_under_the_grant_that_was_issued(
    whole: Stack, tmp_path: Path
) -> None:
    shell, path = Shell(whole.file.home), tmp_path / "grant.json"
    async with two_tenants(whole) as (world, tenant, _):
        await asyncio.to_thread(shell.said, "tenant", "impersonate", tenant, "--reason", "ticket 8", "--out", path)
        grant = SignedImpersonation.model_validate_json(path.read_bytes()).impersonation
        files = Files(tmp_path, whole, tenant, path)
        files.write([line(number, model="a", max_tokens=4) for number in range(3)])
        code, said = await files.run()
        assert (code, said.splitlines()[-1].partition(";")[0]) == (0, "3 lines: 3 completed, 0 errors"), said

        issued, *used = await under(world, grant)
        assert [type(record) for record in (issued, *used)] == [ImpersonationGranted, *[Impersonated] * 3]
        state = State.load(tmp_path / "out.jsonl")
        assert state is not None
        jobs = {state.job_id(number) for number in (1, 2, 3)}
        assert {record.job_id for record in used if isinstance(record, Impersonated)} == jobs
        for job_id in jobs:
            told = [type(record) for record in await audited(world, job_id)]
            assert told[:2] == [Impersonated, Admitted]


async def test_a_router_believes_no_other_grant(whole: Stack) -> None:
    now_ms, key = SystemClock().now_ms(), SigningKey.generate(f"admin-9{next(_numbers)}", KeyRole.ADMIN)
    async with two_tenants(whole) as (world, tenant, other):
        await world.append([published(key)])

        async def believed() -> bool:
            return isinstance(await ask(whole, tenant, make_grant(tenant, now_ms, 3_600_000, key)), JobCompleted)

        await until(believed)
        bad = {
            "the grant is for another tenant": make_grant(other, now_ms, 60_000, key),
            "the grant has expired": make_grant(tenant, now_ms - 120_000, 60_000, key),
            "the grant lasts longer than 60 minutes": make_grant(tenant, now_ms, 3_600_001, key),
        }
        for words, grant in bad.items():
            reply = await ask(whole, tenant, grant)
            assert isinstance(reply, JobRejected)
            assert (reply.reason, reply.message) == (RejectReason.IMPERSONATION, words)
            assert [type(record) for record in await audited(world, reply.job_id)] == [Rejected]

        revoked = KeyRevoked(key_id=key.key_id, reason="lost")
        await world.append([(KEYS.name, key.key_id, revoked)])

        async def refused() -> bool:
            reply = await ask(whole, tenant, make_grant(tenant, now_ms, 3_600_000, key))
            return isinstance(reply, JobRejected) and reply.reason is RejectReason.IMPERSONATION

        await until(refused)


async def _closed(shell: Shell, digest: str) -> list[str]:
    """A replay, once the settler has written every outcome."""
    lines: list[str] = []

    async def complete() -> bool:
        found = await asyncio.to_thread(shell.run, "audit", "replay", "--digest", digest)
        lines[:] = found.stdout.splitlines()
        return found.exit_code == 0

    await until(complete)
    return lines
