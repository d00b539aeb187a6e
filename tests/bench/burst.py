"""What one tenant's flood costs the others: their slowest jobs beside it, and their slowest jobs without it."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from schemas.jobs import JobClass, Parameters
from schemas.metering import UsageRecorded
from schemas.replies import JobCompleted
from schemas.topics import METERING
from tests.bench.children import Say
from tests.bench.figures import Figure, quantile
from tests.bench.records import records_since
from tests.members import start_served
from tests.world import make_world_on

POOL = "bench-burst"
ENGINE = EngineSettings(kind="fake", slots=4, rows=32, step_ms=25)
TOKENS = 32
PROMPT = "Say something about the weather."
FLOODER = "burst-flood"
OTHERS = ("burst-one", "burst-two", "burst-three")
# No quota of the flooder stops it before the fairness does.
PLENTY = {"concurrency_max": 100_000, "adapter_concurrency_max": 100_000, "tokens_per_minute": 1 << 40}
# Jobs a second of the whole engine, and of one tenant's share of it.
CAPACITY = ENGINE.rows / (TOKENS * ENGINE.step_ms / 1000)
SHARE = CAPACITY / (len(OTHERS) + 1)
FLOOD = 20 * SHARE
# The others ask for less than their share, as tenants do whose share was bought to suffice.
PART = 0.6
SEED = 11
ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One job's times from when it was due, in seconds; infinite where it was refused."""

    first_token_s: float
    end_s: float


REFUSED = Latency(first_token_s=math.inf, end_s=math.inf)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The others' jobs without and beside the flood; of the flood how many jobs were tried and how many were done."""

    quiet: Sequence[Latency]
    beside: Sequence[Latency]
    flood_tried: int
    flood_done: int

    def ratio(self, name: str) -> Figure:
        quiet = quantile([getattr(latency, name) for latency in self.quiet], 0.99)
        beside = quantile([getattr(latency, name) for latency in self.beside], 0.99)
        figure = "burst_p99_ratio" if name == "end_s" else "burst_first_token_p99_ratio"
        return Figure(name=figure, value=beside / quiet, unit="ratio", peer=1.0)

    @property
    def refused(self) -> int:
        return sum(latency is REFUSED for latency in (*self.quiet, *self.beside))


async def measure(stack: Stack, seconds: float, say: Say) -> list[Figure]:
    """The router and the settler run already; the worker is started here."""
    async with AsyncExitStack() as opened:
        for tenant in (FLOODER, *OTHERS):
            await asyncio.to_thread(stack.add_tenant, tenant)
        names = dict.fromkeys((FLOODER, *OTHERS), ("a",))
        await opened.enter_async_context(make_world_on(stack, POOL, names, dict(PLENTY)))
        worker = await start_served(stack, "worker-burst", ENGINE, POOL)
        opened.push_async_callback(asyncio.to_thread, worker.stop)
        clients = await _clients(opened, stack, (FLOODER, *OTHERS))
        async with records_since(stack, (METERING,)) as found:
            compared = await compare(clients, seconds, say)
            _say_what_was_waited_for(await found(UsageRecorded), say)
    for name, latencies in (("alone", compared.quiet), ("beside the flood", compared.beside)):
        first, end = ([getattr(latency, key) for latency in latencies] for key in ("first_token_s", "end_s"))
        say(
            f"{POOL}: {name}: first token p50 {quantile(first, 0.5):.3f} s, p99 {quantile(first, 0.99):.3f} s; "
            f"end p50 {quantile(end, 0.5):.3f} s, p99 {quantile(end, 0.99):.3f} s, of {len(latencies)} jobs"
        )
    say(f"{POOL}: of the flood {compared.flood_done} of {compared.flood_tried} jobs ran")
    say(f"{POOL}: of the others' jobs {compared.refused} were refused")
    return [compared.ratio("end_s"), compared.ratio("first_token_s")]


def _say_what_was_waited_for(usages: Sequence[UsageRecorded], say: Say) -> None:
    served = [usage.service for usage in usages if usage.service is not None and usage.identity.tenant in OTHERS]
    reasons = Counter(service.waited_for.value for service in served)
    queued = [float(service.queue_ms) for service in served]
    say(
        f"{POOL}: the others in the worker: queued p50 {quantile(queued, 0.5):.0f} ms, "
        f"p99 {quantile(queued, 0.99):.0f} ms; waited for {dict(reasons)}"
    )


async def _clients(opened: AsyncExitStack, stack: Stack, tenants: Sequence[str]) -> dict[str, JobClient]:
    return {
        tenant: await opened.enter_async_context(JobClient(stack.kafka(tenant), tenant, retry=False))
        for tenant in tenants
    }


async def compare(clients: dict[str, JobClient], seconds: float, say: Say) -> Compared:
    """The others alone for so long, then beside one tenant at 20 times its share for as long again."""
    others = [clients[name] for name in OTHERS]
    for client in clients.values():
        await one(client)
    say(f"{POOL}: {len(OTHERS)} tenants alone for {seconds:.0f} s")
    quiet = await _all(others, seconds)
    say(f"{POOL}: the same beside a flood of {FLOOD:.0f} jobs a second")
    async with asyncio.TaskGroup() as tasks:
        flood = tasks.create_task(arriving(clients[FLOODER], FLOOD, seconds, seed=SEED - 1))
        beside = tasks.create_task(_all(others, seconds))
    flooded = flood.result()
    return Compared(
        quiet=quiet,
        beside=beside.result(),
        flood_tried=len(flooded),
        flood_done=sum(latency is not REFUSED for latency in flooded),
    )


async def _all(clients: Sequence[JobClient], seconds: float) -> list[Latency]:
    """Every client at its part of its share."""
    streams = [arriving(client, SHARE * PART, seconds, SEED + number) for number, client in enumerate(clients)]
    return [latency for stream in await asyncio.gather(*streams) for latency in stream]


async def arriving(client: JobClient, rate: float, seconds: float, seed: int) -> list[Latency]:
    """Jobs that come at random, whatever became of those before."""
    dice, loop = random.Random(seed), asyncio.get_running_loop()
    began, due = loop.time(), 0.0
    running = []
    async with asyncio.TaskGroup() as tasks:
        while (due := due + dice.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - loop.time()))
            running.append(tasks.create_task(one(client, began + due)))
    return [task.result() for task in running]


async def one(client: JobClient, due: float | None = None) -> Latency:
    """One interactive job of a client that does not try again."""
    loop = asyncio.get_running_loop()
    due = due or loop.time()
    parameters = Parameters(max_tokens=TOKENS, temperature=0.0)
    job = await client.submit(alias="a", prompt=PROMPT, parameters=parameters, job_class=JobClass.INTERACTIVE)
    first = None
    async with asyncio.timeout(ANSWER_S):
        async for _ in job.events():
            first = first or loop.time()
        reply = await job.result()
    if not isinstance(reply, JobCompleted):
        return REFUSED
    now = loop.time()
    return Latency(first_token_s=(first or now) - due, end_s=now - due)
