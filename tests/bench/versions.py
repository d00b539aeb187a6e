"""What a tenant that calls another version of its adapter every second costs the adapters of the others.

The same callers have a worker of their own at the same time: what they see there is their quiet count.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import ceil

from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from schemas.audit import AdapterEvicted, AdapterLoaded, LoadSource, Place
from schemas.jobs import Outcome, Parameters
from schemas.metering import UsageRecorded
from schemas.replies import FinalReply, JobCompleted
from schemas.service import Residency
from schemas.topics import AUDIT, METERING
from tests.bench.children import Say
from tests.bench.figures import Figure
from tests.bench.records import Dated, records_since
from tests.factories import configured
from tests.members import start_served
from tests.world import make_world_on


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A tenant that calls each of its adapters steadily. It never has more of them than its share or floor."""

    aliases: tuple[str, ...]
    floor: int = 0
    tokens: int = 4


# Four callers' adapters and one slot. Between two short jobs a tenant has no work, hence no share: its floor keeps what
# it has. The jobs of the last one overlap, so that it always has work, and its share does.
CALLERS = {
    "acme": Caller(aliases=("a", "b"), floor=2),
    "globex": Caller(aliases=("a",), floor=1),
    "initech": Caller(aliases=("a",), tokens=80),
}
ENGINE = EngineSettings(kind="fake", slots=5, rows=32, step_ms=25)
QUIET, BESIDE = "versions-quiet", "versions-beside"
OFFENDER = "versions-offender"
LOADS_PER_MINUTE = 20
# No other quota of the offender stops it before this one does.
PLENTY = {"concurrency_max": 100_000, "adapter_concurrency_max": 100_000, "tokens_per_minute": 1 << 40}
EVERY_S = 0.5
VERSION_S = 1.0
# The broker dates a record a little later than the worker counted the load.
MINUTE_MS = 59_500
PROMPT = "Go on."
ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the log says of one worker's time, or of one tenant's jobs on it. Warm-up is before it."""

    loads: Sequence[AdapterLoaded]
    evictions: Sequence[AdapterEvicted]
    replies: Sequence[FinalReply]
    met: Mapping[Residency, int]

    @property
    def failed(self) -> list[FinalReply]:
        return [reply for reply in self.replies if not isinstance(reply, JobCompleted)]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The callers alone and beside the offender, and when the offender's versions came from the store."""

    quiet: Seen
    beside: Seen
    offender_asked: int
    offender_done: int
    offender_loads_ms: Sequence[int]

    @property
    def most_in_a_minute(self) -> int:
        times = sorted(self.offender_loads_ms)
        return max((sum(at <= other < at + MINUTE_MS for other in times) for at in times), default=0)

    @property
    def figures(self) -> list[Figure]:
        def figure(name: str, value: int, unit: str, peer: int) -> Figure:
            return Figure(name=f"versions_{name}", value=value, unit=unit, peer=peer)

        quiet, beside = self.quiet, self.beside
        return [
            figure("foreign_evictions", len(beside.evictions), "evictions", len(quiet.evictions)),
            figure("foreign_loads", len(beside.loads), "loads", len(quiet.loads)),
            figure("loads_per_minute", self.most_in_a_minute, "loads", LOADS_PER_MINUTE),
        ]


async def measure(stack: Stack, seconds: float, say: Say) -> Measured:
    """The router and the settler run already; both workers are started here."""
    async with AsyncExitStack() as opened:
        quiet = await _house(opened, stack, QUIET, versions=0)
        beside = await _house(opened, stack, BESIDE, versions=ceil(seconds / VERSION_S))
        offender = beside.pop(OFFENDER)
        for client, alias, caller in (*_calls(quiet), *_calls(beside)):
            await _warm(client, alias, caller)
        say(f"versions: for {seconds:.0f} s another version every {VERSION_S:.0f} s, beside {len(beside)} tenants")
        async with records_since(stack, (AUDIT, METERING)) as found, asyncio.TaskGroup() as tasks:
            alone = tasks.create_task(_all(quiet, seconds))
            others = tasks.create_task(_all(beside, seconds))
            asked = tasks.create_task(_every_second_another(offender, seconds))
        loads, evictions = await found.dated(AdapterLoaded), await found.dated(AdapterEvicted)
        usages = await found(UsageRecorded)
    measured = Measured(
        quiet=_seen(quiet, alone.result(), loads, evictions, usages),
        beside=_seen(beside, others.result(), loads, evictions, usages),
        offender_asked=asked.result(),
        offender_done=sum(u.identity.tenant == OFFENDER and u.outcome is Outcome.COMPLETED for u in usages),
        offender_loads_ms=[
            at for at, load in loads if load.owner == OFFENDER and load.source is LoadSource.STORE
        ],
    )  # fmt: skip
    _tell(measured, evictions, say)
    return measured


async def _house(opened: AsyncExitStack, stack: Stack, pool: str, versions: int) -> dict[str, JobClient]:
    """A pool with a worker and the callers' twins, with the offender where it has versions; their clients."""
    names = {_twin(pool, name): caller.aliases for name, caller in CALLERS.items()}
    if versions:
        names[OFFENDER] = tuple(_version(number) for number in range(versions))
    for tenant in names:
        await asyncio.to_thread(stack.add_tenant, tenant)
    world = await opened.enter_async_context(make_world_on(stack, pool, names))
    await world.append(
        [configured(_twin(pool, name), slots_floor=caller.floor) for name, caller in CALLERS.items()]
        + [configured(OFFENDER, loads_per_minute=LOADS_PER_MINUTE, **PLENTY)] * bool(versions)
    )
    worker = await start_served(stack, f"worker-{pool}", ENGINE, pool)
    opened.push_async_callback(asyncio.to_thread, worker.stop)
    return {
        tenant: await opened.enter_async_context(JobClient(stack.kafka(tenant), tenant, retry=False))
        for tenant in names
    }


def _twin(pool: str, name: str) -> str:
    return f"{pool}-{name}"


def _caller(twin: str) -> Caller:
    return CALLERS[twin.rpartition("-")[2]]


def _version(number: int) -> str:
    return f"v{number}"


def _calls(clients: Mapping[str, JobClient]) -> list[tuple[JobClient, str, Caller]]:
    """Each caller's client with each of its aliases."""
    callers = [(client, _caller(tenant)) for tenant, client in clients.items()]
    return [(client, alias, caller) for client, caller in callers for alias in caller.aliases]


async def _warm(client: JobClient, alias: str, caller: Caller) -> None:
    """Until one job ran: the router may hear of a new worker a moment later than we do."""
    async with asyncio.timeout(ANSWER_S):
        while not isinstance(await _call(client, alias, caller), JobCompleted):
            await asyncio.sleep(EVERY_S)


async def _all(clients: Mapping[str, JobClient], seconds: float) -> list[FinalReply]:
    streams = [_steadily(*call, seconds) for call in _calls(clients)]
    return [reply for stream in await asyncio.gather(*streams) for reply in stream]


async def _steadily(client: JobClient, alias: str, caller: Caller, seconds: float) -> list[FinalReply]:
    """A job every EVERY_S, whatever became of those before."""
    loop = asyncio.get_running_loop()
    began, running = loop.time(), []
    async with asyncio.TaskGroup() as tasks:
        for number in range(ceil(seconds / EVERY_S)):
            await asyncio.sleep(max(0.0, began + number * EVERY_S - loop.time()))
            running.append(tasks.create_task(_call(client, alias, caller)))
    return [task.result() for task in running]


async def _every_second_another(client: JobClient, seconds: float) -> int:
    """One job under each version; what becomes of them is the offender's own affair."""
    loop = asyncio.get_running_loop()
    began, versions = loop.time(), ceil(seconds / VERSION_S)
    for number in range(versions):
        await asyncio.sleep(max(0.0, began + number * VERSION_S - loop.time()))
        await client.submit(alias=_version(number), prompt=PROMPT, parameters=Parameters(max_tokens=4))
    return versions


async def _call(client: JobClient, alias: str, caller: Caller) -> FinalReply:
    job = await client.submit(alias=alias, prompt=PROMPT, parameters=Parameters(max_tokens=caller.tokens))
    async with asyncio.timeout(ANSWER_S):
        return await job.result()


def _seen(
    clients: Mapping[str, JobClient],
    replies: Sequence[FinalReply],
    loads: Sequence[Dated[AdapterLoaded]],
    evictions: Sequence[Dated[AdapterEvicted]],
    usages: Sequence[UsageRecorded],
) -> Seen:
    """Every eviction from a slot counts while its owner calls: no caller ever holds more than its share or floor.

    With the last job of a caller without a floor its share ends, and the offender still has versions waiting then.
    """
    own = [usage for usage in usages if usage.identity.tenant in clients]
    last_ms = {usage.identity.tenant: usage.ended_at_ms for usage in sorted(own, key=lambda usage: usage.ended_at_ms)}
    return Seen(
        loads=[load for _, load in loads if load.owner in clients],
        evictions=[
            gone
            for at, gone in evictions
            if gone.owner in last_ms
            and gone.place is Place.SLOT
            and (_caller(gone.owner).floor or at <= last_ms[gone.owner])
        ],
        replies=replies,
        met=Counter(usage.service.residency for usage in own if usage.service is not None),
    )


def _tell(measured: Measured, evictions: Sequence[Dated[AdapterEvicted]], say: Say) -> None:
    for name, seen in (("alone", measured.quiet), ("beside it", measured.beside)):
        met = {residency.value: count for residency, count in seen.met.items()}
        say(
            f"versions: the others {name}: {len(seen.replies)} jobs, {len(seen.failed)} not completed, met {met}; "
            f"{len(seen.loads)} loads, {len(seen.evictions)} evictions"
        )
    others = [gone for _, gone in evictions if gone.owner != OFFENDER and gone.place is Place.SLOT]
    say(f"versions: of the others left their slots in all: {[(gone.owner, gone.reason.value) for gone in others]}")
    own = Counter(gone.reason.value for _, gone in evictions if gone.owner == OFFENDER and gone.place is Place.SLOT)
    say(
        f"versions: the offender: {measured.offender_done} of {measured.offender_asked} jobs ran, "
        f"{len(measured.offender_loads_ms)} loads from the store, at most {measured.most_in_a_minute} in a minute, "
        f"of its own adapters left their slots {dict(own)}"
    )
