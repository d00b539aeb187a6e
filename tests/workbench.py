"""A worker's surroundings for tests: a world, a router's pen, and the records that come back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from itertools import count

from infra.clock import SystemClock
from infra.kafka.records import Incoming
from infra.launch.stack import Stack
from infra.redis import connect
from ledger.answers import Admission, Decision, Granted
from ledger.rebuild import rebuild
from ledger.store import Ledger
from schemas.audit import AUDIT_RECORDS
from schemas.errors import InvalidRecord
from schemas.jobs import JobSubmitted, RequestRouted
from schemas.keys import KeyRole
from schemas.metering import UsageRecorded
from schemas.record import Coordinates, RecordKind, decode_one_of
from schemas.replies import FINAL_REPLIES, JobCompleted, JobFailed, TokensGenerated
from schemas.topics import DLQ_REASON, REQUESTS
from tests.factories import make_job
from tests.routes import make_route
from tests.world import PARTITIONS, World, make_world_on

WAIT_S = 60.0
DEADLINE_MS = 600_000
_names = count(1)


class Bench:
    """A world, a router's pen and the records that come back."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.tenants = sorted({tenant for tenant, _ in world.digests})

    async def admit(self, tenant: str, job: JobSubmitted, **fields: object) -> RequestRouted:
        """Take the lease and sign the route, as a router does."""
        values = {"expires_at_ms": SystemClock().now_ms() + DEADLINE_MS, **fields}
        key = self.world.key(KeyRole.ROUTE)
        request = make_route(self.world.registry, job, tenant, self.world.pool, key, PARTITIONS, **values)
        answer = await self.ledger.admit(
            Admission(
                job_id=job.job_id,
                body_hash=job.body_hash,
                ingress=request.route.ingress,
                decision=Decision.of_route(request.route),
                concurrency_max=10_000,
                adapter_concurrency_max=10_000,
                tokens_per_minute=1 << 40,
                tokens_per_day=1 << 40,
                window_max=10_000,
            )
        )
        assert isinstance(answer, Granted)
        return request

    async def route(self, request: RequestRouted, partition: int | None = None, key: str | None = None) -> Coordinates:
        place = request.route.partition if partition is None else partition
        return await self.world.publisher.publish(
            REQUESTS.of(self.world.pool), key or request.route.identity.adapter, request, partition=place
        )

    async def submit(
        self, tenant: str, alias: str, tokens: int = 8, jobs: int = 1, **fields: object
    ) -> list[RequestRouted]:
        made = [await self.admit(tenant, make_job(alias=alias, tokens_max=tokens), **fields) for _ in range(jobs)]
        await asyncio.gather(*(self.route(request) for request in made))
        return made

    async def replies(self) -> list[JobCompleted | JobFailed]:
        found = [r for tenant in self.tenants for r in await self.world.read(f"replies.{tenant}")]
        replies = [decode_one_of(FINAL_REPLIES, record.value) for record in found]
        return [reply for reply in replies if isinstance(reply, JobCompleted | JobFailed)]

    async def usage(self) -> list[UsageRecorded]:
        records = readable((UsageRecorded,), await self.world.read("metering"))
        return [record for record in records if record.identity.tenant in self.tenants]

    async def chunks(self) -> list[TokensGenerated]:
        found = [r for tenant in self.tenants for r in await self.world.read(f"stream.{tenant}")]
        return readable((TokensGenerated,), found)

    async def audit(self) -> list[object]:
        """Of this world's adapters: other tests write to the same topic, and what they provoke is theirs."""
        own = {*self.world.digests.values(), self.world.base.zero_adapter}
        records = readable(AUDIT_RECORDS, [r for r in await self.world.read("audit") if (r.key or b"").decode() in own])
        return list(records)

    async def letters(self) -> list[str]:
        """Reasons of the dead letters of this pool."""
        topic = REQUESTS.of(self.world.pool).encode()
        return [(dict(r.headers)[DLQ_REASON] or b"").decode() for r in await self.world.read("dlq") if r.key == topic]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await condition():
                await asyncio.sleep(0.1)

    async def finished(self, number: int) -> list[JobCompleted | JobFailed]:
        """Wait for this many final replies, and check that every one has exactly one usage record."""

        async def enough() -> bool:
            return len(await self.replies()) >= number

        await self.until(enough)
        replies = await self.replies()
        usage = Counter(record.job_id for record in await self.usage())
        assert len(replies) == number
        assert usage == Counter(reply.job_id for reply in replies)
        assert set(usage.values()) <= {1}
        return replies


def readable(kinds: tuple[type[RecordKind], ...], records: Sequence[Incoming]) -> list[RecordKind]:
    """The records of a shared topic, without the broken ones that other tests put there."""
    found: list[RecordKind] = []
    for record in records:
        with suppress(InvalidRecord):
            found.append(decode_one_of(kinds, record.value))
    return found


@asynccontextmanager
async def bench_on(
    stack: Stack, tenants: Sequence[str], aliases: Sequence[str] = ("a", "b", "c")
) -> AsyncIterator[Bench]:
    async with bench_in(stack, lambda pool: make_world_on(stack, pool, dict.fromkeys(tenants, aliases))) as bench:
        yield bench


@asynccontextmanager
async def bench_in(stack: Stack, making: Callable[[str], AbstractAsyncContextManager[World]]) -> AsyncIterator[Bench]:
    """A bench in the world that is made in a pool of this name."""
    async with AsyncExitStack() as opened:
        admin = connect(stack.redis("admin"))
        opened.push_async_callback(admin.aclose)
        await rebuild(stack.kafka("admin"), admin)
        ledger = Ledger(connect(stack.redis("router")))
        opened.push_async_callback(ledger.close)
        yield Bench(await opened.enter_async_context(making(f"pool-{next(_names)}")), ledger)
