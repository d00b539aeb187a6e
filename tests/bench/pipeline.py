"""The whole pipeline beside the same engine called in process: what it adds to a first token, what it costs."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from consumers.engines import protocol
from consumers.engines.protocol import Artifact
from infra.artifacts import fetch_artifact
from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from infra.objects import FileObjects
from infra.settings import EngineSettings
from producers.client import JobClient
from producers.job import Job
from schemas.adapters import AdapterManifest
from schemas.jobs import JobClass, Parameters
from schemas.record import decode_one_of
from schemas.replies import FinalReply, JobCompleted, TokensGenerated
from schemas.topics import STREAM
from tests.bench.children import BenchFailed, Say, measured_by
from tests.bench.figures import Figure, middle_rate, quantile
from tests.bench.loads import Load, Measured, arrivals, open_loop
from tests.bench.machine import quiet
from tests.bench.peer import PeerTask
from tests.world import make_world_on

POOL = "bench-fake"
ENGINE = EngineSettings(kind="fake", slots=4, rows=32, rank_max=8, context_max=1024, step_ms=25)
# Two tenants with two adapters each.
ALIASES = (("bench-one", "a"), ("bench-one", "b"), ("bench-two", "a"), ("bench-two", "b"))
PLENTY = 100_000
# Whatever the load, a job that is not answered must not hold up the bench.
PIPELINE_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A pool that can be started: its engine, and its adapters in the order in which jobs use them."""

    pool: str
    engine: EngineSettings
    aliases: Sequence[tuple[str, str]]
    manifests: Sequence[AdapterManifest]
    load: Load


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The same load, in process and through the pipeline."""

    peer: Measured
    pipeline: Measured

    def added_ms(self, name: str, share: float) -> Figure:
        peer_ms = quantile(self.peer.ttft_s, share) * 1000
        return Figure(name=name, value=quantile(self.pipeline.ttft_s, share) * 1000 - peer_ms, unit="ms", peer=peer_ms)

    def throughput(self, ratio: str, absolute: str) -> list[Figure]:
        ours, theirs = self.pipeline.tokens_per_s, self.peer.tokens_per_s
        return [
            Figure(name=ratio, value=ours / theirs, unit="ratio", peer=1.0),
            Figure(name=absolute, value=ours, unit="tokens/s", peer=theirs),
        ]


async def measure(stack: Stack, load: Load, say: Say) -> list[Figure]:
    tenants = sorted({tenant for tenant, _ in ALIASES})
    for tenant in tenants:
        await asyncio.to_thread(stack.add_tenant, tenant)
    rows: dict[str, object] = {"concurrency_max": PLENTY}
    async with make_world_on(stack, POOL, dict.fromkeys(tenants, ("a", "b")), rows) as world:
        entries = [world.registry.adapters[world.digests[name]] for name in ALIASES]
        manifests = [entry.manifest for entry in entries if entry.manifest is not None]
        setup = Setup(pool=POOL, engine=ENGINE, aliases=ALIASES, manifests=manifests, load=load)
        compared = await compare(stack, setup, say)
    return [
        compared.added_ms("ttft_added_ms_p50", 0.5),
        compared.added_ms("ttft_added_ms_p99", 0.99),
        *compared.throughput("pipeline_throughput_ratio", "pipeline_tokens_per_s"),
    ]


async def compare(stack: Stack, setup: Setup, say: Say) -> Compared:
    """The router and the settler run already; nothing else does."""
    say(f"{setup.pool}: the engine in process")
    peer = await measured_by("tests.bench.peer", await _peer_task(stack, setup), Measured)
    say(f"{setup.pool}: {peer.tokens_per_s:.0f} tokens/s in process; the worker starts")
    worker = await asyncio.to_thread(
        lambda: stack.start_engine(f"worker-{setup.pool}", engine=setup.engine, pool=setup.pool)
    )
    try:
        await quiet(setup.pool, say)
        async with asyncio.timeout(PIPELINE_S):
            pipeline = await _through_pipeline(stack, setup, peer.rate, say)
    except TimeoutError as error:
        raise BenchFailed(f"the jobs of {setup.pool} did not end within {PIPELINE_S:.0f} s") from error
    finally:
        await asyncio.to_thread(worker.stop)
    return Compared(peer=peer, pipeline=pipeline)


async def _peer_task(stack: Stack, setup: Setup) -> PeerTask:
    cache = stack.file.home / "bench-peer"
    objects = FileObjects(stack.objects_dir)
    artifacts = [
        Artifact(
            digest=manifest.digest,
            path=await fetch_artifact(objects, manifest, cache),
            rank=manifest.rank,
            bytes=sum(entry.size for entry in manifest.files),
        )
        for manifest in setup.manifests
    ]
    engine = setup.engine
    settings = protocol.EngineSettings(
        base_dir=engine.base or cache,
        slots=engine.slots,
        rows=engine.rows,
        rank_max=engine.rank_max,
        context_max=engine.context_max,
        kv_bytes=engine.kv_bytes,
        fake_step_ms=engine.step_ms,
    )
    return PeerTask(kind=engine.kind, settings=settings, artifacts=tuple(artifacts), load=setup.load)


async def _through_pipeline(stack: Stack, setup: Setup, rate: float, say: Say) -> Measured:
    async with AsyncExitStack() as opened:
        names = sorted({tenant for tenant, _ in setup.aliases})
        clients = {
            name: await opened.enter_async_context(JobClient(stack.kafka(name), name, retry=False)) for name in names
        }
        submitter = Submitter(clients, setup)
        for place in range(len(setup.aliases)):
            await submitter.first_token(place)
        say(f"{setup.pool}: {setup.load.jobs} jobs through the pipeline, {rate:.2g} a second")
        ttft_s = await open_loop(arrivals(setup.load, rate), submitter.first_token)
        say(f"{setup.pool}: {setup.load.saturating} jobs at once")
        tokens_per_s = await _saturated(stack, setup, submitter)
    return Measured(ttft_s=ttft_s, tokens_per_s=tokens_per_s, rate=rate)


class Submitter:
    """Submits the load's jobs as their tenants."""

    def __init__(self, clients: dict[str, JobClient], setup: Setup) -> None:
        self._clients = clients
        self._setup = setup

    async def submit(self, place: int, job_class: JobClass) -> Job:
        tenant, alias = self._setup.aliases[place % len(self._setup.aliases)]
        load = self._setup.load
        parameters = Parameters(max_tokens=load.tokens, temperature=0.0)
        return await self._clients[tenant].submit(
            alias=alias, messages=load.messages, parameters=parameters, job_class=job_class
        )

    async def first_token(self, place: int) -> float:
        job = await self.submit(place, JobClass.INTERACTIVE)
        came = None
        async for _ in job.events():
            came = came or asyncio.get_running_loop().time()
        completed(await job.result())
        # An answer without text has no first token that anybody would see before its end.
        return came or asyncio.get_running_loop().time()


def completed(reply: FinalReply) -> None:
    if not isinstance(reply, JobCompleted):
        raise BenchFailed(f"a job did not complete: {reply}")


async def _saturated(stack: Stack, setup: Setup, submitter: Submitter) -> float:
    """Tokens per second, by the times at which the worker's chunks were appended."""
    topics = sorted({STREAM.of(tenant) for tenant, _ in setup.aliases})
    settings = stack.kafka("admin")
    before = {topic: await end_offsets(settings, topic) for topic in topics}
    submitted = await asyncio.gather(
        *(submitter.submit(place, JobClass.BATCH) for place in range(setup.load.saturating))
    )
    for job in submitted:
        completed(await job.result())
    chunks = [
        (record.timestamp_ms / 1000, chunk.tokens)
        for topic in topics
        for partition, start in before[topic].items()
        async for record in read_range(settings, topic, partition, start)
        if isinstance(chunk := decode_one_of(STREAM.records, record.value), TokensGenerated)
    ]
    return middle_rate(chunks)
