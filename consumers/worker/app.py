"""The worker process: read settings, check the base, start the engine, join the group, work, drain, leave."""

import asyncio
import secrets
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

from consumers.engines import protocol
from consumers.engines.protocol import Engine, EngineRequest
from consumers.engines.select import default_kind, engine_environment, make_engine
from consumers.worker.doors import Doors
from consumers.worker.loop import Worker
from infra.artifacts import find_base
from infra.failpoints import Failpoints
from infra.kafka.group import Group
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Apply, Tail
from infra.logs import ActionLog
from infra.objects import open_objects
from infra.process import Process, apply_environment, run
from infra.redis import connect
from infra.settings import EngineSettings, KafkaSettings, ObjectSettings, PoolSettings, RedisSettings, read
from ledger.registry import Registry
from ledger.store import Ledger
from schemas.adapters import PoolConfigured
from schemas.audit import LoadReason
from schemas.errors import InvalidRecord
from schemas.jobs import RequestCancelled
from schemas.topics import CANCELS, REGISTRY, REQUESTS

log = ActionLog("worker")

# A pool may be configured after its workers were started.
POOL_LOOK_S = 5.0
SMOKE_PROMPT = "ready?"


def main() -> int:
    return run(_work)


async def _work(process: Process) -> None:
    kafka, pool = read(KafkaSettings), read(PoolSettings).name
    engine_settings = read(EngineSettings)
    life = f"{process.name}-{uuid.uuid4().hex[:8]}"
    registry = Registry()
    heard: list[Worker] = []
    async with AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
        view = Tail(kafka, [topic.name for topic in REGISTRY], _folding(registry, heard), process.clock)
        opened.push_async_callback(view.stop)
        await view.start()
        following = tasks.create_task(view.run())
        configured = await _pool(process, view, registry, pool)
        if configured is None:
            following.cancel()
            return
        process.not_ready = lambda: "the engine is starting"
        engine = await _engine(engine_settings, configured, registry)
        opened.push_async_callback(engine.stop)
        doors = await _open_doors(opened, process, kafka, registry, view, configured, engine, life)
        worker = Worker(doors, tasks)
        await _smoke(worker, registry)
        heard.append(worker)
        cancels = Tail(kafka, [CANCELS.of(pool)], _hearing(worker), process.clock, from_end=True)
        opened.push_async_callback(cancels.stop)
        await cancels.start()
        listening = tasks.create_task(cancels.run())
        group = Group(kafka, REQUESTS.of(pool), worker.lanes_opened, worker.lanes_lost, client_id=process.name)
        opened.push_async_callback(group.stop)
        process.not_ready = lambda: worker.not_ready
        working = tasks.create_task(worker.run(group))
        await process.stopping.wait()
        log.info("worker.stopping")
        worker.stop()
        await working
        await doors.audit.close()
        for task in (following, listening):
            task.cancel()


def _folding(registry: Registry, heard: list[Worker]) -> Apply:
    def apply(record: Incoming) -> None:
        folded = registry.apply(record.topic, record.offset, record.value)
        for worker in heard:
            worker.registry_changed(folded)

    return apply


def _hearing(worker: Worker) -> Apply:
    def apply(record: Incoming) -> None:
        try:
            worker.cancelled(RequestCancelled.decode(record.value))
        except InvalidRecord as error:
            log.warning("cancel.unreadable", source=str(record.coordinates), detail=str(error))

    return apply


async def _pool(process: Process, view: Tail, registry: Registry, pool: str) -> PoolConfigured | None:
    """The pool's record, once there is one. None when the process was told to stop first."""
    process.not_ready = lambda: f"pool {pool} is not configured"
    while not process.stopping.is_set():
        configured = registry.pools.get(pool)
        if configured is not None and configured.base in registry.bases:
            return configured
        await view.wait_until(lambda: pool in registry.pools, POOL_LOOK_S)
    return None


async def _engine(settings: EngineSettings, pool: PoolConfigured, registry: Registry) -> Engine:
    """The engine on the pool's base, whose files were hashed again. Raises BaseMismatch, EngineDead."""
    manifest = registry.bases[pool.base].manifest
    directory = settings.base or Path()
    if settings.kind != "fake":
        directory = await asyncio.to_thread(find_base, directory, manifest)
    apply_environment(engine_environment())
    engine = make_engine(
        settings.kind or default_kind(settings.device),
        protocol.EngineSettings(
            base_dir=directory,
            device=settings.device,
            slots=settings.slots,
            rows=settings.rows,
            rank_max=pool.rank_max,
            context_max=min(pool.context_max, manifest.context_max),
            kv_bytes=settings.kv_bytes,
            host_bytes=settings.host_bytes,
            host_adapters_max=settings.host_adapters_max,
            memory_bytes=settings.memory_bytes,
            fake_step_ms=settings.step_ms,
        ),
    )
    await engine.start()
    log.info("engine.started", engine=engine.build.id, base=pool.base)
    return engine


async def _open_doors(
    opened: AsyncExitStack,
    process: Process,
    kafka: KafkaSettings,
    registry: Registry,
    view: Tail,
    pool: PoolConfigured,
    engine: Engine,
    life: str,
) -> Doors:
    publisher = Publisher(kafka, life, process.clock)
    opened.push_async_callback(publisher.stop)
    await publisher.start()
    audit = AuditWriter(publisher, life)
    await audit.start()
    ledger = Ledger(connect(read(RedisSettings)))
    opened.push_async_callback(ledger.close)
    return Doors(
        worker=process.name,
        pool=pool.pool,
        base=pool.base,
        engine=engine,
        ledger=ledger,
        publisher=publisher,
        audit=audit,
        registry=registry,
        view=view,
        objects=open_objects(read(ObjectSettings)),
        cache=process.settings.home / "adapters",
        metrics=process.metrics,
        clock=process.clock,
        failpoints=Failpoints.from_environment(),
        salt_key=secrets.token_bytes(32),
    )


async def _smoke(worker: Worker, registry: Registry) -> None:
    """One token under the zero adapter, before any tenant's: an engine that cannot is not offered to the group."""
    doors = worker.doors
    zero = registry.bases[doors.base].zero_adapter
    await worker.adapters.make_resident(zero, frozenset, dict, LoadReason.SMOKE)
    request = EngineRequest(
        request_id="smoke",
        digest=zero,
        prompt_ids=doors.engine.encode(SMOKE_PROMPT),
        max_tokens=1,
        cache_salt=secrets.token_hex(16),
        temperature=0.0,
    )
    async for _ in doors.engine.generate(request):
        pass
