"""A thousand jobs that end at every step there is: nothing stays held, and what is counted is what was used."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import cycle

import pytest

from infra.redis import Client, connect
from ledger.answers import Admission, Granted, Used
from ledger.keys import member_of
from ledger.rebuild import Gate, miscounted
from ledger.store import Ledger
from schemas.jobs import JobClass, Limits
from tests.conftest import RedisServer
from tests.fakes_ledger import at, make_admission, make_decision, make_refusal

pytestmark = [pytest.mark.slow]

JOBS = 1_000
TENANTS = ("acme", "globex", "initech")
LIMITS = Limits(tokens_max=20, context_max=1024, prompt_tokens=10)
USED = Used(prompt_tokens=10, completion_tokens=7, load_ms=3)
REQUEST = at("requests.main", 5)
# A lease of a job that nobody takes up.
SHORT_MS = 300
WAIT_S = 30.0

Ending = Callable[[Ledger, Admission], Awaitable[Used | None]]


@pytest.fixture
async def admin(redis_server: RedisServer) -> AsyncIterator[Client]:
    client = connect(redis_server.redis("admin"))
    gate = Gate(client)
    await gate.load()
    await gate.open(await gate.raise_epoch())
    yield client
    await client.aclose()


async def granted(ledger: Ledger, ask: Admission) -> None:
    assert isinstance(await ledger.admit(ask), Granted)


async def begin(ledger: Ledger, ask: Admission, fence: str = "7.0") -> None:
    await ledger.begin(ask.tenant, ask.job_id, REQUEST, fence)


async def settle(ledger: Ledger, ask: Admission, used: Used) -> Used:
    await ledger.settle(ask.tenant, ask.job_id, ask.ingress, used)
    return used


async def refused(ledger: Ledger, ask: Admission) -> None:
    await ledger.refuse(make_refusal(ask.job_id))


async def taken_back_before_it_came(ledger: Ledger, ask: Admission) -> None:
    await ledger.cancel(ask.tenant, ask.job_id)
    await ledger.admit(ask)


async def cancelled_before_it_began(ledger: Ledger, ask: Admission) -> Used:
    await granted(ledger, ask)
    await ledger.cancel(ask.tenant, ask.job_id)
    await begin(ledger, ask)
    return await settle(ledger, ask, Used())


async def completed(ledger: Ledger, ask: Admission) -> Used:
    await granted(ledger, ask)
    await begin(ledger, ask)
    return await settle(ledger, ask, USED)


async def failed_after_two_crashes(ledger: Ledger, ask: Admission) -> Used:
    await granted(ledger, ask)
    for life in range(3):
        await begin(ledger, ask, f"7.{life}")
    return await settle(ledger, ask, Used(prompt_tokens=10))


async def handed_over_and_settled_twice(ledger: Ledger, ask: Admission) -> Used:
    await granted(ledger, ask)
    await begin(ledger, ask)
    await ledger.hand_over(ask.tenant, ask.job_id, REQUEST, 1)
    await begin(ledger, ask, "7.1")
    await settle(ledger, ask, USED)
    return await settle(ledger, ask, Used(prompt_tokens=10, completion_tokens=20))


async def settled_without_beginning(ledger: Ledger, ask: Admission) -> Used:
    await granted(ledger, ask)
    return await settle(ledger, ask, Used())


async def left_alone(ledger: Ledger, ask: Admission) -> None:
    """Nobody takes it up: its lease ends by time."""
    await granted(ledger, ask)


ENDINGS: tuple[Ending, ...] = (
    refused, taken_back_before_it_came, cancelled_before_it_began, completed, failed_after_two_crashes,
    handed_over_and_settled_twice, settled_without_beginning, left_alone,
)  # fmt: skip


async def test_whatever_becomes_of_a_thousand_jobs_nothing_stays_held(admin: Client) -> None:
    ledger = Ledger(admin)
    seconds, _ = await admin.time()
    used: dict[str, int] = dict.fromkeys(TENANTS, 0)

    async def run(number: int, ending: Ending) -> None:
        tenant = TENANTS[number % len(TENANTS)]
        left_ms = SHORT_MS if ending is left_alone else 600_000
        decision = make_decision(
            tenant,
            f"adapter-{number % 5}",
            JobClass.BATCH,
            number % 4,
            expires_at_ms=int(seconds) * 1000 + 5000 + left_ms,
        ).model_copy(update={"limits": LIMITS})
        grace_ms = 0 if ending is left_alone else 30_000
        ask = make_admission(f"job-{number}", decision, concurrency_max=JOBS, window_max=10 * JOBS, grace_ms=grace_ms)
        came_to = await ending(ledger, ask)
        if came_to is not None and ending is not handed_over_and_settled_twice:
            used[tenant] += came_to.prompt_tokens + came_to.completion_tokens
        elif ending is handed_over_and_settled_twice:
            used[tenant] += USED.prompt_tokens + USED.completion_tokens

    await asyncio.gather(*(run(n, ending) for n, ending in zip(range(JOBS), cycle(ENDINGS), strict=False)))
    async with asyncio.timeout(WAIT_S):
        while (status := await ledger.status()).leases:
            await asyncio.sleep(0.05)
    assert (status.tenants, status.adapters, status.windows, status.references) == ({}, {}, {}, {})
    assert {tenant: spent.day for tenant, spent in status.spent.items()} == used
    gate = Gate(admin)
    rows = await gate.rows()
    assert miscounted(await ledger.status(), rows) == []
    assert member_of("acme", "job-3") in rows
