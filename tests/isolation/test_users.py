"""Users: a password that was replaced and a tenant that was removed open nothing. West's, who goes last."""

import asyncio

import pytest

from infra.settings import KafkaSettings, StackFile
from schemas.audit import Admitted, Finished, Started
from schemas.jobs import Outcome
from schemas.replies import JobCompleted, JobFailed
from schemas.tenants import TenantConfigured, TenantState
from schemas.topics import BATCH, TENANTS
from tests.factories import make_job
from tests.integration.test_acls import write
from tests.integration.test_release_cli import Shell
from tests.integration.test_tenant_users import login_refusal
from tests.isolation.house import CANARY, NORTH, SOUTH, WEST, House
from tests.isolation.notes import Note
from tests.isolation.test_names import refused
from tests.isolation.test_traces import search_for, secrets_of, usage_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

SECRET = "west-secret"
NO_LOGIN = "_AUTHENTICATION"
# Longer than what a revocation lets run to its end.
LONG_TOKENS = 400


def credentials(house: House) -> KafkaSettings:
    """West's, as they are kept now."""
    return StackFile.load(house.stack.file.home).kafka(WEST)


async def switchyard(house: House, *words: str) -> str:
    """The operator's command. It runs an event loop of its own, hence a thread."""
    return await asyncio.to_thread(Shell(house.stack.file.home).said, *words)


async def posted(user: KafkaSettings, tokens: int) -> str:
    """A job of west's, with these credentials; its id."""
    job = make_job(alias=SECRET, prompt=CANARY, tokens_max=tokens)
    assert await asyncio.to_thread(write, user, BATCH.of(WEST), job.encode()) is None
    return job.job_id


async def test_a_rotated_password(house: House, note: Note) -> None:
    old = credentials(house)
    await switchyard(house, "tenant", "rotate", WEST)
    new = credentials(house)
    assert await asyncio.to_thread(login_refusal, old) == NO_LOGIN
    reply = await house.reply_to(WEST, await posted(new, 8))
    house.check(reply, WEST, SECRET, 8)
    await house.right(NORTH, "a")
    proof = await house.proof(Finished, job_id=reply.job_id, tenant=WEST)
    note("rotated password: the old one connects again", f"{NO_LOGIN}; the new one's job runs", proof)


async def test_a_removed_tenant(house: House, note: Note) -> None:
    user = credentials(house)
    running = await posted(user, LONG_TOKENS)
    await house.proof(Started, job_id=running)
    await switchyard(house, "tenant", "remove", WEST)
    assert await asyncio.to_thread(login_refusal, user) == NO_LOGIN
    # What runs is taken out; what somebody put into its topic comes too late.
    reply = await house.reply_to(WEST, running)
    assert isinstance(reply, JobFailed)
    assert reply.outcome is Outcome.REVOKED
    late = await posted(house.stack.kafka("admin"), 8)
    proof = await house.proof(Finished, job_id=running, outcome=Outcome.REVOKED, tenant=WEST)
    for tenant in (NORTH, SOUTH):
        assert isinstance(await house.right(tenant, "a"), JobCompleted)
    assert not await house.audit(Admitted, job_id=late)
    note(
        "removed tenant: connects again; its job that ran, and one that lies in its topic",
        f"{NO_LOGIN}; revoked in mid-run; never admitted",
        f"{proof}; no Admitted after {await removal(house)}",
    )


async def removal(house: House) -> str:
    for record in reversed(await house.world.read(TENANTS.name)):
        if record.key == WEST.encode():
            said = TenantConfigured.decode(record.value)
            assert said.state is TenantState.REMOVED
            return f"TenantConfigured {said.state} at {record.coordinates}"
    raise AssertionError("no record of west")


async def test_the_names_of_a_removed_tenant(house: House, note: Note) -> None:
    digest = house.digest(WEST, SECRET)
    proofs = [await refused(house, name) for name in (SECRET, digest)]
    searched = sum([await search_for(house, WEST, mine) for mine in (NORTH, SOUTH)])
    for tenant in (NORTH, SOUTH):
        shown = (await usage_of(house, tenant, "--json")).encode()
        assert not [secret for secret in secrets_of(house, WEST) if secret in shown]
    note(
        "removed tenant's alias and digest: south names them, and both search what they can read",
        f"refused in the words of an unknown one; nothing found in {searched} records",
        "; ".join(proofs),
    )
