"""A router at work on the shared stack: what tenants append, and what the log says afterwards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from confluent_kafka import Producer

from infra.kafka import clients
from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.redis import connect
from ledger.rebuild import rebuild
from ledger.store import Ledger
from schemas.audit import AUDIT_RECORDS, Admitted, CancelRequested, Rejected
from schemas.jobs import JobCancelled, JobSubmitted, RequestCancelled, RequestRouted
from schemas.record import Record, decode_one_of
from schemas.replies import JobRejected
from schemas.topics import CANCELS, DLQ, REQUESTS, Role
from tests.factories import ready
from tests.members import in_the_group
from tests.world import PARTITIONS, World, make_world_on

WAIT_S = 60.0
LOOK_S = 0.1
_names = count(1)


@dataclass(kw_only=True)
class Routing:
    """One test's pool and tenants, and the routers it starts."""

    stack: Stack
    world: World
    ledger: Ledger
    tenants: Sequence[str]
    processes: list[Process] = field(default_factory=list)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    serving: bool = False

    @property
    def tenant(self) -> str:
        return self.tenants[0]

    async def start(self, failpoint: str = "") -> Process:
        """Start a router and wait until it is ready; with a failpoint it will not live long."""
        name = f"router-{self.world.pool}-{len(self.processes)}"
        env = {"SWITCHYARD_FAILPOINT": failpoint} if failpoint else {}
        process = await asyncio.to_thread(self.stack.start, name, Role.ROUTER, env)
        self.processes.append(process)
        return process

    async def serve(self, rows: int) -> None:
        """A ready worker on every partition of the pool, or with no rows one that has no place."""
        name = f"w-{self.world.pool}"
        if not self.serving:
            self.serving = True
            await self.opened.enter_async_context(in_the_group(self.stack, self.world.pool, name))
        await self.world.append([ready(self.world.base.base, name, self.world.pool, rows, range(PARTITIONS))])

    async def post(self, topic: str, *contents: Record | bytes, tenant: str | None = None) -> None:
        """Append with a foreign client, as the tenant: plain JSON, no headers of ours, no key."""
        name = tenant or self.tenant
        await asyncio.to_thread(self._produce, f"{topic}.{name}", name, contents)

    def _produce(self, topic: str, tenant: str, contents: Sequence[Record | bytes]) -> None:
        producer = Producer({**self.stack.kafka(tenant).librdkafka(), "linger.ms": 5})
        for content in contents:
            value = content if isinstance(content, bytes) else content.encode()
            producer.produce(topic, value, headers=[("tenant", b"globex"), ("ce_subject", b"sha256:" + b"0" * 64)])
        assert producer.flush(WAIT_S) == 0

    async def jobs(self, *jobs: JobSubmitted | bytes, tenant: str | None = None) -> None:
        await self.post("jobs", *jobs, tenant=tenant)

    async def cancel(self, *job_ids: str) -> None:
        await self.post("cancel", *(JobCancelled(job_id=job_id) for job_id in job_ids))

    async def routed(self) -> list[tuple[RequestRouted, Incoming]]:
        records = await self.world.read(REQUESTS.of(self.world.pool))
        return [(RequestRouted.decode(record.value), record) for record in records]

    async def routed_ids(self) -> set[str]:
        return {request.route.job_id for request, _ in await self.routed()}

    async def rejected(self, tenant: str | None = None) -> list[JobRejected]:
        return [JobRejected.decode(r.value) for r in await self.world.read(f"replies.{tenant or self.tenant}")]

    async def cancelled(self) -> list[RequestCancelled]:
        return [RequestCancelled.decode(r.value) for r in await self.world.read(CANCELS.of(self.world.pool))]

    async def letters(self) -> list[Incoming]:
        """Dead letters of this test's tenants."""
        sources = {f"{topic}.{name}".encode() for name in self.tenants for topic in ("jobs", "batch", "cancel")}
        return [record for record in await self.world.read(DLQ.name) if record.key in sources]

    async def audit(self) -> list[Admitted | Rejected | CancelRequested]:
        records = [decode_one_of(AUDIT_RECORDS, r.value) for r in await self.world.read("audit")]
        kept = [r for r in records if isinstance(r, Admitted | Rejected | CancelRequested)]
        return [r for r in kept if (r.identity.tenant if isinstance(r, Admitted) else r.tenant) in self.tenants]

    async def lag(self) -> int:
        """Records of this test's tenants that no router has committed yet."""
        settings = self.stack.kafka("admin")
        admin = clients.make_admin(settings)
        await clients.start(admin)
        committed = await admin.list_consumer_group_offsets("router.router")
        await clients.stop(admin)
        places = {place.topic: offset.offset for place, offset in committed.items()}
        topics = [f"{topic}.{name}" for name in self.tenants for topic in ("jobs", "batch", "cancel")]
        ends = {topic: (await end_offsets(settings, topic))[0] for topic in topics}
        return sum(end - max(0, places.get(topic, 0)) for topic, end in ends.items())

    async def drained(self) -> None:
        """Wait until every record was worked on and committed."""

        async def none() -> bool:
            return await self.lag() == 0

        await until(none)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that a process of the stack brings about."""
    for _ in range(round(WAIT_S / LOOK_S)):
        if await condition():
            return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"not within {WAIT_S:.0f} s")


@asynccontextmanager
async def routing_on(
    stack: Stack,
    tenants: Sequence[str],
    rows: int = 1000,
    limits: dict[str, object] | None = None,
    aliases: Sequence[str] = ("a", "b"),
) -> AsyncIterator[Routing]:
    """A pool with a ready worker and these tenants, each with these adapters, and an open ledger."""
    admin = connect(stack.redis("admin"))
    await rebuild(stack.kafka("admin"), admin)
    ledger = Ledger(connect(stack.redis("router")))
    name = f"routing-{next(_names)}"
    values = {"concurrency_max": 10_000, **(limits or {})}
    async with make_world_on(stack, name, dict.fromkeys(tenants, aliases), values) as world:
        routing = Routing(stack=stack, world=world, ledger=ledger, tenants=tenants)
        if rows:
            await routing.serve(rows)
        try:
            yield routing
        finally:
            for process in routing.processes:
                process.stop()
            await routing.opened.aclose()
            await ledger.close()
            await admin.aclose()
