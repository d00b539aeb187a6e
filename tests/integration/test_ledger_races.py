"""Sixteen hundred at once for a hundred places: exactly a hundred, and never more at any instant that is looked at."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from infra.redis import connect
from ledger.answers import Admission, Granted, Status
from ledger.rebuild import Gate
from ledger.store import Ledger
from schemas.jobs import JobClass, Limits
from tests.conftest import RedisServer
from tests.fakes_ledger import make_admission, make_decision

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ASKS = 1_600
ROOM = 100
ROUNDS = 100
CLIENTS = 4
TOKENS = 30
LIMITS = Limits(tokens_max=TOKENS - 10, context_max=1024, prompt_tokens=10)
# No window is short: what is raced for is the tenant's own.
WINDOW_MAX = 100_000


@pytest.fixture
async def ledgers(redis_server: RedisServer) -> AsyncIterator[list[Ledger]]:
    """The ledger as several processes see it, each over connections of its own."""
    async with AsyncExitStack() as opened:
        clients = [connect(redis_server.redis("admin")) for _ in range(CLIENTS)]
        for client in clients:
            opened.push_async_callback(client.aclose)
        gate = Gate(clients[0])
        await gate.load()
        await gate.open(await gate.raise_epoch())
        yield [Ledger(client) for client in clients]


async def now_ms(client: Redis) -> int:
    return int((await client.time())[0]) * 1000


def asks_of(tenant: str, expires_at_ms: int, pools: Sequence[str], limits: dict[str, Any]) -> list[Admission]:
    decision = make_decision(tenant, job_class=JobClass.BATCH, expires_at_ms=expires_at_ms)
    return [
        make_admission(
            f"job-{number}",
            decision.model_copy(update={"limits": LIMITS, "pool": pools[number % len(pools)]}),
            **{"concurrency_max": 10**6, "window_max": WINDOW_MAX, **limits},
        )
        for number in range(ASKS)
    ]


async def raced(ledgers: list[Ledger], asks: list[Admission]) -> tuple[int, list[Status]]:
    """How many were granted, and what was seen meanwhile."""
    seen: list[Status] = []
    over = asyncio.Event()

    async def look() -> None:
        while not over.is_set():
            seen.append(await ledgers[0].status())

    looking = asyncio.create_task(look())
    answers = await asyncio.gather(*(ledgers[n % CLIENTS].admit(ask) for n, ask in enumerate(asks)))
    over.set()
    await looking
    seen.append(await ledgers[0].status())
    assert len(seen) > 1
    return sum(isinstance(answer, Granted) for answer in answers), seen


@pytest.mark.parametrize("pools", [("main",), ("main", "other")], ids=["one pool", "two pools"])
@pytest.mark.parametrize("what", ["tokens_per_day", "tokens_per_minute", "concurrency_max"])
async def test_of_sixteen_hundred_at_once_exactly_a_hundred_are_admitted(
    ledgers: list[Ledger], what: str, pools: Sequence[str]
) -> None:
    limit = ROOM if what == "concurrency_max" else ROOM * TOKENS
    expires_at_ms = await now_ms(ledgers[0]._redis) + 600_000
    for number in range(-(-ROUNDS // 6)):
        tenant = f"race-{number}"
        granted, seen = await raced(ledgers, asks_of(tenant, expires_at_ms, pools, {what: limit}))
        assert granted == ROOM
        assert max(status.tenants.get(tenant, 0) for status in seen) <= ROOM
        assert max(status.spent[tenant].day for status in seen if tenant in status.spent) <= ROOM * TOKENS
