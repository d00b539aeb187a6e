"""The gate process: every adapter that was submitted and not reported on is tried, and the report signed."""

import asyncio
import uuid
from contextlib import AsyncExitStack

from consumers.engines.protocol import EngineDead
from consumers.gate.bench import CannotTry, TrialBench
from consumers.gate.checks import judge
from infra.artifacts import BaseMismatch
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Tail
from infra.keys import load_key
from infra.logs import ActionLog
from infra.objects import ObjectStoreDown, open_objects
from infra.process import Process, run
from infra.settings import EngineSettings, KafkaSettings, KeySettings, ObjectSettings, read
from ledger.registry import AdapterEntry, Registry
from schemas.adapters import AdapterGated
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from schemas.topics import ADAPTERS, REGISTRY

log = ActionLog("gate")

# An engine holds gigabytes: it goes when nothing was submitted for so long.
IDLE_S = 120.0
LOOK_S = 0.5
RETRY_S = 5.0


def main() -> int:
    return run(_work)


async def _work(process: Process) -> None:
    kafka = read(KafkaSettings)
    registry = Registry()

    def fold(record: Incoming) -> None:
        registry.apply(record.topic, record.offset, record.value)

    async with AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
        view = Tail(kafka, [topic.name for topic in REGISTRY], fold, process.clock)
        opened.push_async_callback(view.stop)
        await view.start()
        following = tasks.create_task(view.run())
        publisher = Publisher(kafka, f"{process.name}-{uuid.uuid4().hex[:8]}", process.clock)
        opened.push_async_callback(publisher.stop)
        await publisher.start()
        bench = TrialBench(
            read(EngineSettings), registry, open_objects(read(ObjectSettings)), process.settings.home / "adapters"
        )
        opened.push_async_callback(bench.stop)
        gate = Gate(registry, view, publisher, bench, load_key(read(KeySettings), KeyRole.GATE))
        process.not_ready = lambda: None
        await gate.run(process)
        following.cancel()


class Gate:
    """Tries what waits, one adapter after the other, oldest first."""

    def __init__(
        self, registry: Registry, view: Tail, publisher: Publisher, bench: TrialBench, key: SigningKey
    ) -> None:
        self._registry = registry
        self._view = view
        self._publisher = publisher
        self._bench = bench
        self._key = key

    async def run(self, process: Process) -> None:
        """Work until the process is told to stop; a trial in hand is finished first."""
        idle_since = process.clock.monotonic()
        while not process.stopping.is_set():
            waiting = next(iter(self._waiting()), None)
            if waiting is not None:
                await self._try(waiting)
                idle_since = process.clock.monotonic()
            else:
                await self._view.wait_until(lambda: bool(self._waiting()), LOOK_S)
            if self._bench.started and process.clock.monotonic() - idle_since > IDLE_S:
                await self._bench.stop()

    def _waiting(self) -> list[AdapterEntry]:
        """Submitted, not reported on, not revoked; only where a pool serves the base."""
        bases = {pool.base for pool in self._registry.pools.values()}
        return [
            entry
            for entry in self._registry.adapters.values()
            if entry.submitted and not entry.gated and not entry.revoked and entry.submitted.manifest.base in bases
        ]

    async def _try(self, entry: AdapterEntry) -> None:
        assert entry.submitted is not None, "only submitted adapters wait"
        log.info("trial.started", adapter=entry.digest)
        try:
            trial = await self._bench.try_adapter(entry.submitted.manifest)
        except (CannotTry, BaseMismatch, EngineDead, ObjectStoreDown, OSError) as error:
            # Not the adapter's fault: no report, and another try.
            log.error("trial.failed", adapter=entry.digest, detail=str(error))
            await self._bench.stop()
            await asyncio.sleep(RETRY_S)
            return
        report = judge(entry.digest, self._bench.engine_id, trial)
        gated = AdapterGated(
            adapter=entry.digest, report=report, key_id=self._key.key_id, signature=self._key.sign(report)
        )
        where = await self._publisher.publish(ADAPTERS.name, entry.digest, gated, subject=entry.digest)
        log.info("trial.reported", adapter=entry.digest, passed=report.passed, problems=report.problems)
        await self._view.wait_until(lambda: self._registry.positions.get(ADAPTERS.name, 0) > where.offset, RETRY_S)
