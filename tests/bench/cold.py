"""How long a cold tenant waits for its first token beside saturating hot ones, on the real engine and a tiny model."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from consumers.worker.scheduler import QUANTUM_S
from infra.clock import SystemClock
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from producers.release import platform
from producers.release.desk import Desk, open_desk
from producers.release.platform import PoolShape
from producers.release.publish import Submission
from schemas.audit import AdapterLoaded
from schemas.jobs import JobClass, Parameters
from schemas.metering import UsageRecorded
from schemas.replies import JobCompleted
from schemas.tenants import TenantConfigured
from schemas.topics import AUDIT, METERING
from tests.bench.children import BenchFailed, Say, measured_by
from tests.bench.figures import Figure, quantile
from tests.bench.plain_vllm import PlainAnswer, PlainTrace
from tests.bench.real import admitted
from tests.bench.records import records_since
from tests.members import start_served
from tests.models import marker_adapter, tiny_base

POOL = "bench-cold"
BASE_NAME = "tiny-cold"
CONTEXT_MAX = 256
HOT = tuple(f"hot-{number}" for number in range(4))
COLD = "cold-one"
# Each is asked for once, so that each is cold when it is asked for.
COLD_ALIASES = tuple(f"c{number}" for number in range(4))
# As in facts/vllm.md section 4.1: uneven lengths, or the hot ones would end in lock-step and a slot would get free.
CLIENTS, TOKENS_MIN, TOKENS_MAX, SEED = 16, 8, 48, 5
COLD_TOKENS = 8
PROMPT = "What now?"
WARM_S = 5.0
PAUSE_S = 3.0
ANSWER_S = 60.0
# Plain vLLM lets the cold one wait for as long as the hot ones go on: it is asked for so long.
GIVE_UP_S = 30.0
PLENTY = {"concurrency_max": 10_000, "adapter_concurrency_max": 10_000, "tokens_per_minute": 1 << 40}


def engine_on(base: Path) -> EngineSettings:
    return EngineSettings(
        kind="vllm", base=base, slots=len(HOT), rows=CLIENTS, context_max=CONTEXT_MAX, kv_bytes=32 << 20
    )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a cold job may wait for: each part as it was measured in this run, in seconds."""

    decode_s: float
    load_s: float
    prefill_s: float

    @property
    def seconds(self) -> float:
        return QUANTUM_S + self.decode_s + self.load_s + self.prefill_s

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s (quantum {QUANTUM_S:.2f} + longest decode {self.decode_s:.2f} "
            f"+ load p95 {self.load_s:.2f} + prefill {self.prefill_s:.2f})"
        )


async def measure(stack: Stack, say: Say) -> list[Figure]:
    """The router and the settler run already."""
    with tempfile.TemporaryDirectory(prefix="switchyard-cold-") as folder:
        base = tiny_base(Path(folder) / "base")
        say(f"{POOL}: the same trace on vLLM alone, under its own scheduler")
        plain = await measured_by("tests.bench.plain_vllm", plain_trace(base), PlainAnswer)
        async with _served(stack, base, say) as clients:
            first = await _alone(clients[HOT[0]])
            waited, bound = await _cold_beside_hot(stack, clients, first, say)
    worst, peer = max(waited), plain.first_token_s
    say(f"{POOL}: cold first tokens {', '.join(f'{w:.2f}' for w in waited)} s; bound {bound}")
    say(f"{POOL}: plain vLLM {'never, given up after' if plain.starved else 'after'} {peer:.2f} s")
    return [
        Figure(name="cold_first_token_s", value=worst, unit="s", peer=peer),
        Figure(name="cold_over_bound_s", value=worst - bound.seconds, unit="s", peer=peer - bound.seconds),
    ]


def plain_trace(base: Path) -> PlainTrace:
    adapters = [marker_adapter(base.parent / f"plain-{number}", base, 20 + number) for number in range(len(HOT) + 1)]
    return PlainTrace(
        base=base,
        hot=tuple(adapters[:-1]),
        cold=adapters[-1],
        clients=CLIENTS,
        tokens_min=TOKENS_MIN,
        tokens_max=TOKENS_MAX,
        cold_tokens=COLD_TOKENS,
        seed=SEED,
        prompt=PROMPT,
        warm_s=WARM_S,
        give_up_s=GIVE_UP_S,
        context_max=CONTEXT_MAX,
    )


async def _cold_beside_hot(
    stack: Stack, clients: dict[str, JobClient], prefill_s: float, say: Say
) -> tuple[list[float], Bound]:
    over = asyncio.Event()
    say(f"{POOL}: {CLIENTS} clients on {len(HOT)} hot adapters and as many slots")
    async with records_since(stack, (AUDIT, METERING)) as found:
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(_closed_loop(clients[HOT[number % len(HOT)]], number, over))
            try:
                await asyncio.sleep(WARM_S)
                waited = []
                for alias in COLD_ALIASES:
                    waited.append(await _first_token(clients[COLD], alias, COLD_TOKENS, JobClass.INTERACTIVE))
                    await asyncio.sleep(PAUSE_S)
            finally:
                over.set()
        return waited, _bound(await found(AdapterLoaded), await found(UsageRecorded), prefill_s)


def _bound(loads: Sequence[AdapterLoaded], usages: Sequence[UsageRecorded], prefill_s: float) -> Bound:
    per_token = [u.service.token_us / 1e6 for u in usages if u.service is not None and u.service.token_us is not None]
    if not per_token or not loads:
        raise BenchFailed("no hot job ran, or nothing was loaded")
    return Bound(
        decode_s=TOKENS_MAX * quantile(per_token, 0.95),
        load_s=quantile([record.duration_ms / 1000 for record in loads], 0.95),
        prefill_s=prefill_s,
    )


async def _closed_loop(client: JobClient, number: int, over: asyncio.Event) -> None:
    dice = random.Random(SEED + number)
    while not over.is_set():
        await _first_token(client, "a", dice.randint(TOKENS_MIN, TOKENS_MAX), JobClass.BATCH)


async def _alone(client: JobClient) -> float:
    """The first token of a warm job with nobody beside it: one prefill and the way through the pipeline."""
    await _first_token(client, "a", COLD_TOKENS, JobClass.BATCH)
    return await _first_token(client, "a", COLD_TOKENS, JobClass.BATCH)


async def _first_token(client: JobClient, alias: str, tokens: int, job_class: JobClass) -> float:
    loop = asyncio.get_running_loop()
    began, first = loop.time(), None
    parameters = Parameters(max_tokens=tokens, temperature=0.0)
    job = await client.submit(alias=alias, prompt=PROMPT, job_class=job_class, parameters=parameters)
    async with asyncio.timeout(ANSWER_S):
        async for _ in job.events():
            first = first or loop.time()
        reply = await job.result()
    if not isinstance(reply, JobCompleted):
        raise BenchFailed(f"a job did not complete: {reply}")
    return (first or loop.time()) - began


@asynccontextmanager
async def _served(stack: Stack, base: Path, say: Say) -> AsyncIterator[dict[str, JobClient]]:
    """A pool with hot and cold adapters, its worker, and every tenant's client."""
    async with open_desk(stack.file, SystemClock(), "bench") as desk:
        say(f"{POOL}: a tiny base and {len(HOT) + len(COLD_ALIASES)} adapters are made known")
        await _release(stack, desk, base)
    worker = await start_served(stack, "worker-cold", engine_on(base), POOL)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(asyncio.to_thread, worker.stop)
        yield {name: await opened.enter_async_context(JobClient(stack.kafka(name), name)) for name in (*HOT, COLD)}


async def _release(stack: Stack, desk: Desk, base: Path) -> None:
    await platform.add_base(desk, base, BASE_NAME)
    shape = PoolShape(rank_max=8, context_max=CONTEXT_MAX, partitions=4)
    await platform.set_pool(desk, stack.kafka("admin"), POOL, BASE_NAME, shape)
    number = 0
    for tenant, aliases in {**dict.fromkeys(HOT, ("a",)), COLD: COLD_ALIASES}.items():
        limits = TenantConfigured.model_validate({"tenant": tenant, "configured_by": desk.actor, **PLENTY})
        await platform.add_tenant(desk, stack.file, limits)
        for alias in aliases:
            number += 1
            directory = marker_adapter(base.parent / f"{tenant}-{alias}", base, number)
            await admitted(desk, Submission(directory=directory, tenant=tenant, alias=alias, base=BASE_NAME))
