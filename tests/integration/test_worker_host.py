"""Adapters between slot, host memory and store, in a worker process on a real Kafka and Redis."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from consumers.worker.cli import worker as command
from consumers.worker.watermark import REPORT
from infra.credentials import use_home
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.settings import EngineSettings
from schemas.adapters import AdapterRevoked, WorkerReady
from schemas.audit import AdapterEvicted, AdapterLoaded, EvictReason, LoadReason, LoadSource, Place
from schemas.service import Residency
from schemas.topics import ADAPTERS, WORKERS
from tests.workbench import Bench, bench_on, readable

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

ONE_SLOT = EngineSettings(kind="fake", slots=1, rows=8, step_ms=10)
Tenants = Callable[[], str]
Workers = Callable[[Bench, EngineSettings], Process]


@pytest.fixture
def worker(stack: Stack) -> Iterator[Workers]:
    started: list[Process] = []

    def start(bench: Bench, engine: EngineSettings) -> Process:
        name = f"worker-{bench.world.pool}-host-{len(started)}"
        process = stack.start_engine(name, engine=engine, pool=bench.world.pool)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


async def loads(bench: Bench, digest: str) -> list[tuple[Place, LoadSource, LoadReason]]:
    records = await bench.audit()
    return [(r.place, r.source, r.reason) for r in records if isinstance(r, AdapterLoaded) and r.adapter == digest]


async def test_an_adapter_that_left_its_slot_comes_back_from_host_memory(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await asyncio.to_thread(worker, bench, ONE_SLOT)
        name = bench.tenants[0]
        first = bench.world.digests[name, "a"]
        for number, alias in enumerate(("a", "b", "a"), 1):
            await bench.submit(name, alias)
            await bench.finished(number)
        assert [(place, source) for place, source, _ in await loads(bench, first)] == [
            (Place.SLOT, LoadSource.STORE),
            (Place.SLOT, LoadSource.HOST),
        ]
        met = {u.identity.adapter: u.service.residency for u in await bench.usage() if u.service is not None}
        assert met[first] is Residency.HOST
        left = [r for r in await bench.audit() if isinstance(r, AdapterEvicted) and r.adapter == first]
        assert (left[0].place, left[0].kept_in_host) == (Place.SLOT, True)


async def test_a_queued_record_brings_its_adapter_near_before_its_turn(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        # The first job holds the only slot for longer than it takes to see that it began.
        await asyncio.to_thread(worker, bench, ONE_SLOT.model_copy(update={"step_ms": 60}))
        name = bench.tenants[0]
        await bench.submit(name, "a", tokens=150)
        await bench.until(lambda: loaded(bench, bench.world.digests[name, "a"]))
        await bench.submit(name, "b")
        await bench.finished(2)
        assert await loads(bench, bench.world.digests[name, "b"]) == [
            (Place.HOST, LoadSource.STORE, LoadReason.PREFETCH),
            (Place.SLOT, LoadSource.HOST, LoadReason.JOB),
        ]


async def test_a_full_host_memory_drops_one_copy_for_another(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        # Room for two of the fake's adapters and nothing more; one is the zero adapter of the smoke request.
        size = await one_adapter(bench, worker)
        tight = ONE_SLOT.model_copy(update={"host_bytes": 2 * size})
        await asyncio.to_thread(worker, bench, tight)
        name = bench.tenants[0]
        for number, alias in enumerate(("a", "b", "c", "a"), 2):
            await bench.submit(name, alias)
            await bench.finished(number)
        dropped = [r for r in await bench.audit() if isinstance(r, AdapterEvicted) and r.place is Place.HOST]
        reasons = {r.reason for r in dropped} - {EvictReason.SHUTDOWN}
        assert reasons
        assert reasons <= {EvictReason.OWN_SHARE, EvictReason.RECLAIM_BORROWED, EvictReason.IDLE}


async def test_a_revoked_adapter_leaves_host_memory_too(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await asyncio.to_thread(worker, bench, ONE_SLOT)
        name = bench.tenants[0]
        digest = bench.world.digests[name, "a"]
        for number, alias in enumerate(("a", "b"), 1):
            await bench.submit(name, alias)
            await bench.finished(number)
        revoked = AdapterRevoked(adapter=digest, reason="test", revoked_by="test")
        await bench.world.append([(ADAPTERS.name, digest, revoked)])

        async def out() -> bool:
            records = [r for r in await bench.audit() if isinstance(r, AdapterEvicted) and r.adapter == digest]
            return any((r.reason, r.place) == (EvictReason.REVOKED, Place.HOST) for r in records)

        await bench.until(out)


async def test_memory_near_its_limit_lowers_the_rows_and_drops_copies_before_anything_fails(
    stack: Stack, tenant: Tenants, worker: Workers
) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        # The fake's KV cache alone is above nine tenths of this.
        short = ONE_SLOT.model_copy(update={"kv_bytes": 95 << 20, "memory_bytes": 100 << 20})
        await asyncio.to_thread(worker, bench, short)

        async def lowered() -> bool:
            said = readable((WorkerReady,), await bench.world.read(WORKERS.name))
            return any(ready.pool == bench.world.pool and ready.rows == 1 for ready in said)

        await bench.until(lowered)
        await bench.submit(bench.tenants[0], "a", jobs=4)
        await bench.finished(4)


async def test_the_operator_sees_where_the_memory_is(stack: Stack, tenant: Tenants, worker: Workers) -> None:
    async with bench_on(stack, [tenant()]) as bench:
        await asyncio.to_thread(worker, bench, ONE_SLOT)
        await bench.submit(bench.tenants[0], "a")
        await bench.finished(1)
        home, name = stack.file.home, f"worker-{bench.world.pool}-host-0"
        report = home / name / REPORT

        async def shows_an_adapter() -> bool:
            return report.is_file() and bool(json.loads(report.read_text())["adapters"])

        await bench.until(shows_an_adapter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SWITCHYARD_HOME", "")
            use_home(home)
            shown = CliRunner().invoke(command, ["memory"])
            (said,) = [
                r for r in json.loads(CliRunner().invoke(command, ["memory", "--json"]).output) if r["worker"] == name
            ]
        assert name in shown.output
        parts = ("base_weights", "slots", "host_cache", "workspace", "kv_cache", "fragmentation", "unexplained")
        assert sum(said[part] for part in parts) == said["process"]
        assert all(abs(a["bytes"] / a["predicted"] - 1) <= 0.05 for a in said["adapters"])


async def loaded(bench: Bench, digest: str) -> bool:
    return bool(await loads(bench, digest))


async def one_adapter(bench: Bench, worker: Workers) -> int:
    """What one of this tenant's adapters takes on the fake engine."""
    process = await asyncio.to_thread(worker, bench, ONE_SLOT)
    await bench.submit(bench.tenants[0], "a")
    await bench.finished(1)
    digest = bench.world.digests[bench.tenants[0], "a"]
    records = [r for r in await bench.audit() if isinstance(r, AdapterLoaded) and r.adapter == digest]
    await asyncio.to_thread(process.stop)
    return records[0].resident_bytes
