"""Names: what is not yours is answered like what does not exist."""

import asyncio
import statistics
from collections.abc import Callable

import pytest

from consumers.router.decide import UNKNOWN_ALIAS
from infra.clock import SystemClock
from schemas.adapters import AdapterDrained, AdapterRevoked
from schemas.audit import Finished, Rejected
from schemas.jobs import RejectReason
from schemas.record import decode_one_of
from schemas.replies import FinalReply, JobCompleted, JobRejected
from schemas.topics import ADAPTERS
from tests.factories import granted, pointed, withdrawn
from tests.isolation.house import NORTH, SOUTH, House
from tests.isolation.notes import Note

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROUNDS = 25
# Medians further apart than this would tell one from the other.
TIME_CLASS = 2.0
# A grant ends by the clock: no record says so.
EXPIRES_MS = 1_000
DAY_MS = 24 * 3600 * 1000

Told = tuple[RejectReason, str, bool, int | None]


def told(reply: FinalReply) -> Told:
    """All of a refusal but which job it is about."""
    assert isinstance(reply, JobRejected), reply
    return reply.reason, reply.message, reply.retryable, reply.retry_after_ms


UNKNOWN: Told = (RejectReason.UNKNOWN_ALIAS, UNKNOWN_ALIAS, False, None)


async def refused_alike(house: House, alias: str) -> FinalReply:
    reply = await house.ask(SOUTH, alias)
    assert told(reply) == UNKNOWN
    return reply


async def refused(house: House, alias: str) -> str:
    """South names what it may not use. Returns the proof."""
    reply = await refused_alike(house, alias)
    await refused_alike(house, "never-heard-of")
    assert not await house.routes(reply.job_id or "")
    return str(await house.proof(Rejected, job_id=reply.job_id, tenant=SOUTH))


async def test_a_guessed_alias(house: House, note: Note) -> None:
    await house.right(NORTH, "north-secret")
    note(
        "guessed alias: south names north's",
        "refused in the words of an unknown one",
        await refused(house, "north-secret"),
    )


async def test_a_guessed_digest(house: House, note: Note) -> None:
    for spelling in (str, str.upper, lambda digest: digest.removeprefix("sha256:")):
        proof = await refused(house, _spelt(spelling, house.digest(NORTH, "a")))
    note("guessed digest: south names north's adapter itself, in three spellings", "refused, the same", proof)


def _spelt(spelling: Callable[[str], str], digest: str) -> str:
    return spelling(digest)


async def medians_ms(house: House, *aliases: str) -> list[float]:
    """How long south waits for a refusal of each. Asked in turns, so that a busy machine slows all alike."""
    took: dict[str, list[float]] = {alias: [] for alias in aliases}
    clock = asyncio.get_running_loop().time
    for _ in range(ROUNDS):
        for alias, times in took.items():
            began = clock()
            await refused_alike(house, alias)
            times.append(clock() - began)
    return [statistics.median(times) * 1000 for times in took.values()]


async def test_the_time_of_a_refusal(house: House, note: Note) -> None:
    yours, nobodys = await medians_ms(house, "north-secret", "never-heard-of")
    assert 1 / TIME_CLASS < yours / nobodys < TIME_CLASS
    proof = (await house.audit(Rejected, tenant=SOUTH, reason=RejectReason.UNKNOWN_ALIAS))[-1]
    note(
        "time of a refusal: north's alias against an unknown one",
        f"{yours:.0f} ms and {nobodys:.0f} ms, one class",
        proof,
    )


async def test_a_grant_out_of_its_time(house: House, note: Note) -> None:
    """Its own alias, of its own adapter, while its grant is over or has not begun."""
    for alias in ("lapsed", "early"):
        await house.world.append([pointed(SOUTH, alias, house.digest(SOUTH, "b")), granted(SOUTH, alias)])

        async def known(alias: str = alias) -> bool:
            return isinstance(await house.ask(SOUTH, alias), JobCompleted)

        await house.until(known)
    now_ms = SystemClock().now_ms()
    await house.world.append(
        [
            granted(SOUTH, "lapsed", expires_at_ms=now_ms + EXPIRES_MS),
            granted(SOUTH, "early", not_before_ms=now_ms + DAY_MS),
        ]
    )
    for alias in ("lapsed", "early"):

        async def over(alias: str = alias) -> bool:
            return isinstance(await house.ask(SOUTH, alias), JobRejected)

        await house.until(over)
    lapsed, early, nobodys = await medians_ms(house, "lapsed", "early", "never-heard-of")
    assert 1 / TIME_CLASS < lapsed / nobodys < TIME_CLASS
    assert 1 / TIME_CLASS < early / nobodys < TIME_CLASS
    note(
        "expired grant, and one that is not in force yet: its own tenant asks",
        f"refused in the words of an unknown alias, in its time: {lapsed:.0f}, {early:.0f} and {nobodys:.0f} ms",
        f"{await refused(house, 'lapsed')}; {await refused(house, 'early')}",
    )


async def test_a_withdrawn_and_an_expired_grant(house: House, note: Note) -> None:
    await house.right(SOUTH, "c")
    proofs = []
    for ended in (withdrawn(SOUTH, "c"), granted(SOUTH, "c", expires_at_ms=1)):
        await house.world.append([ended])

        async def refused_now() -> bool:
            reply = await house.ask(SOUTH, "c")
            if isinstance(reply, JobRejected):
                assert told(reply) == UNKNOWN
                proofs.append(await house.proof(Rejected, job_id=reply.job_id, tenant=SOUTH))
            return isinstance(reply, JobRejected)

        await house.until(refused_now)
    note(
        "withdrawn grant, expired grant: its own tenant asks again",
        "refused in the words of an unknown one",
        proofs[-1],
    )


async def test_two_tenants_with_the_same_alias_name(house: House, note: Note) -> None:
    first, second = await house.right(NORTH, "a"), await house.right(SOUTH, "a")
    assert first.receipt.identity.adapter != second.receipt.identity.adapter
    proofs = [await house.proof(Finished, job_id=reply.job_id) for reply in (first, second)]
    note("both tenants have an alias `a`", "each gets its own digest", f"{proofs[0]}; {proofs[1]}")


async def test_a_revoked_version(house: House, note: Note) -> None:
    digest = house.digest(NORTH, "c")
    await house.right(NORTH, "c")
    revoked = AdapterRevoked(adapter=digest, reason="recalled", revoked_by="tests")
    await house.world.append([(ADAPTERS.name, digest, revoked)])
    drained: list[AdapterDrained] = []

    async def gone() -> bool:
        kinds = ADAPTERS.records
        records = [decode_one_of(kinds, r.value) for r in await house.world.read(ADAPTERS.name)]
        drained[:] = [r for r in records if isinstance(r, AdapterDrained) and r.adapter == digest]
        return bool(drained)

    await house.until(gone)
    reply = await house.ask(NORTH, "c")
    assert told(reply) == UNKNOWN
    proof = await house.proof(Rejected, job_id=reply.job_id)
    note(
        "revoked version: its own tenant asks again",
        "refused, and out of the engine",
        f"{proof}; AdapterDrained by {drained[0].worker}",
    )
