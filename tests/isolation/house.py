"""Two tenants with equal alias names on one pool, a router, a settler and a worker: the house that cells break into.

A third tenant is there to be taken away.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from confluent_kafka import Producer

from infra.kafka.records import Incoming
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from schemas.audit import AUDIT_RECORDS, AuditRecord
from schemas.jobs import JobClass, JobSubmitted, Parameters, RequestRouted
from schemas.record import Record, decode_one_of
from schemas.replies import FINAL_REPLIES, FinalReply, JobCompleted
from schemas.topics import AUDIT, REPLIES, REQUESTS
from tests.members import start_served
from tests.workbench import readable
from tests.world import World, make_world_on

WAIT_S = 60.0
LOOK_S = 0.05
POOL = "matrix"
NORTH, SOUTH, WEST = "north", "south", "west"
# The two have `a`, `b` and `c`; the last of each is a secret of its owner.
ALIASES = {NORTH: ("a", "b", "c", "north-secret"), SOUTH: ("a", "b", "c", "south-secret"), WEST: ("west-secret",)}
ENGINE = EngineSettings(kind="fake", slots=2, rows=8, step_ms=20)
# In every prompt: what must be found in no log and no metric.
CANARY = "canary-words-of-a-prompt"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record of the audit and where it lies."""

    record: AuditRecord
    where: Incoming

    def __str__(self) -> str:
        detail = next((str(getattr(self.record, n)) for n in ("reason", "outcome") if hasattr(self.record, n)), "")
        return f"{self.record.type} {detail} at {self.where.coordinates}".replace("  ", " ")


@dataclass(kw_only=True)
class House:
    """The stack, its world, and the own client of each of the two tenants."""

    stack: Stack
    world: World
    clients: Mapping[str, JobClient]
    workers: list[str] = field(default_factory=list)

    def digest(self, tenant: str, alias: str) -> str:
        return self.world.digests[tenant, alias]

    def marker(self, tenant: str, alias: str) -> str:
        return f"«{self.digest(tenant, alias).removeprefix('sha256:')[:8]}»"

    async def start_worker(self) -> None:
        name = f"worker-{POOL}-{len(self.workers)}"
        await start_served(self.stack, name, ENGINE, POOL)
        self.workers.append(name)

    async def ask(self, tenant: str, alias: str, tokens: int = 8, job_class: JobClass = JobClass.BATCH) -> FinalReply:
        """One job's final reply."""
        job = await self.clients[tenant].submit(
            alias=alias, prompt=f"{CANARY} Go on.", parameters=Parameters(max_tokens=tokens), job_class=job_class
        )
        async with asyncio.timeout(WAIT_S):
            return await job.result()

    async def right(self, tenant: str, alias: str, tokens: int = 8) -> JobCompleted:
        """One job that must be answered by its own adapter and by no other."""
        reply = await self.ask(tenant, alias, tokens)
        self.check(reply, tenant, alias, tokens)
        assert isinstance(reply, JobCompleted)
        return reply

    def check(self, reply: FinalReply, tenant: str, alias: str, tokens: int) -> None:
        assert isinstance(reply, JobCompleted), reply
        assert reply.receipt.identity.adapter == self.digest(tenant, alias)
        assert reply.receipt.identity.tenant == tenant
        assert reply.text.count("«") == 1
        assert reply.text.startswith(self.marker(tenant, alias))
        assert reply.usage.completion_tokens == tokens

    async def post(
        self, topic: str, tenant: str, value: bytes, headers: Sequence[tuple[str, bytes]] = (), key: bytes | None = None
    ) -> None:
        """Append with a foreign client under a tenant's own credentials."""

        def produce() -> None:
            producer = Producer({**self.stack.kafka(tenant).librdkafka(), "log_level": 0})
            producer.produce(topic, value, key, headers=list(headers))
            assert producer.flush(WAIT_S) == 0

        await asyncio.to_thread(produce)

    async def post_job(self, tenant: str, job: JobSubmitted, headers: Sequence[tuple[str, bytes]] = ()) -> None:
        await self.post(f"batch.{tenant}", tenant, job.encode(), headers)

    async def reply_to(self, tenant: str, job_id: str) -> FinalReply:
        """The first final reply on the tenant's topic to a job."""
        return (await self.replies_to(tenant, job_id))[0]

    async def replies_to(self, tenant: str, job_id: str, number: int = 1) -> list[FinalReply]:
        found: list[FinalReply] = []

        async def some() -> bool:
            found[:] = [r for r in await self.replies(tenant) if r.job_id == job_id]
            return len(found) >= number

        await self.until(some)
        return found

    async def replies(self, tenant: str) -> list[FinalReply]:
        return list(readable(FINAL_REPLIES, await self.world.read(REPLIES.of(tenant))))

    async def routes(self, job_id: str) -> list[tuple[RequestRouted, Incoming]]:
        records = await self.world.read(REQUESTS.of(POOL))
        routed = [(RequestRouted.decode(record.value), record) for record in records]
        return [(request, record) for request, record in routed if request.route.job_id == job_id]

    async def audit(self, kind: type[AuditRecord], **fields: object) -> list[Found]:
        """Records of the audit of one type with these fields; `tenant` is looked for in the identity too."""
        found = []
        for where in await self.world.read(AUDIT.name):
            record = decode_one_of(AUDIT_RECORDS, where.value)
            if isinstance(record, kind) and all(_field(record, name) == value for name, value in fields.items()):
                found.append(Found(record=record, where=where))
        return found

    async def proof(self, kind: type[AuditRecord], **fields: object) -> Found:
        """The record of the audit that must be there, waited for."""
        found: list[Found] = []

        async def there() -> bool:
            found[:] = await self.audit(kind, **fields)
            return bool(found)

        await self.until(there)
        return found[0]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await condition():
                await asyncio.sleep(LOOK_S)


def _field(record: Record, name: str) -> object:
    identity = getattr(record, "identity", None)
    if name == "tenant" and identity is not None:
        return identity.tenant
    return getattr(record, name, None)


@asynccontextmanager
async def house_on(stack: Stack) -> AsyncIterator[House]:
    for tenant in ALIASES:
        await asyncio.to_thread(stack.add_tenant, tenant)
    async with AsyncExitStack() as opened:
        world = await opened.enter_async_context(make_world_on(stack, POOL, ALIASES, {"concurrency_max": 1000}))
        clients = {
            tenant: await opened.enter_async_context(JobClient(stack.kafka(tenant), tenant))
            for tenant in (NORTH, SOUTH)
        }
        house = House(stack=stack, world=world, clients=clients)
        await house.start_worker()
        yield house
