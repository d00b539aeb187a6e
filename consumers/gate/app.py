"""The gate process: every adapter that was submitted and has no believed report is tried, and the report signed."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress

from consumers.engines.protocol import EngineDead, EngineError
from consumers.gate.bench import CannotTry, TrialBench
from consumers.gate.checks import Trial, judge
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
from schemas.adapters import AdapterGated, GateReport
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from schemas.topics import ADAPTERS, REGISTRY

log = ActionLog("gate")

# An engine holds gigabytes: it goes when nothing was submitted for so long.
IDLE_S = 120.0
LOOK_S = 0.5
RETRY_S = 5.0
# An adapter under which the engine dies so often is refused.
DEATHS_MAX = 3


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
        process.not_ready = lambda: gate.problem
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
        self._failures: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        # Why nothing is tried. The status server's thread reads it.
        self.problem: str | None = "starting"

    async def run(self, process: Process) -> None:
        """Work until the process is told to stop. A trial in hand is given up: the next gate begins it anew."""
        idle_since = process.clock.monotonic()
        while not process.stopping.is_set():
            self._look_at_key()
            waiting = self._waiting()
            if waiting:
                await _unless(process.stopping, self._try(waiting[0], process))
                idle_since = process.clock.monotonic()
            else:
                await self._view.wait_until(lambda: bool(self._waiting()), LOOK_S)
            if self._bench.started and process.clock.monotonic() - idle_since > IDLE_S:
                await self._bench.stop()

    def _look_at_key(self) -> None:
        problem = self._registry.signing_problem(self._key)
        if problem != self.problem:
            log.warning("trials.changed", problem=problem or "none")
        self.problem = problem

    def _waiting(self) -> list[AdapterEntry]:
        """Submitted, without a believed report, not revoked, with a pool for its base; none while nobody believes us.

        What is approved already comes last, and what could not be tried after that.
        """
        if self._registry.signing_problem(self._key) is not None:
            return []
        bases = {pool.base for pool in self._registry.pools.values()}
        found = [
            entry
            for entry in self._registry.adapters.values()
            if entry.submitted
            and not entry.revoked
            and entry.submitted.manifest.base in bases
            and self._registry.report_problem(entry.digest) is not None
        ]
        return sorted(found, key=lambda entry: (self._failures[entry.digest], entry.approved is not None))

    async def _try(self, entry: AdapterEntry, process: Process) -> None:
        assert entry.submitted is not None, "only submitted adapters wait"
        log.info("trial.started", adapter=entry.digest)
        try:
            trial = await self._bench.try_adapter(entry.submitted.manifest)
        except EngineDead as error:
            # Once may be chance. The engine is gone, and with it whatever the adapter left in it.
            self._deaths[entry.digest] += 1
            await self._put_off(entry.digest, error)
            if self._deaths[entry.digest] < DEATHS_MAX:
                return
            trial = Trial(problems=(f"the engine died under it, {DEATHS_MAX} times of {DEATHS_MAX}",))
        except (CannotTry, BaseMismatch, EngineError, ObjectStoreDown, OSError) as error:
            # Not the adapter's fault: no report, and another try.
            await self._put_off(entry.digest, error)
            return
        process.metrics.count("adapter_loads", result="failed" if trial.problems else "loaded")
        await self._report(judge(entry.digest, self._bench.engine_id, trial))

    async def _put_off(self, digest: str, error: Exception) -> None:
        log.error("trial.failed", adapter=digest, detail=str(error))
        self._failures[digest] += 1
        await self._bench.stop()
        await asyncio.sleep(RETRY_S)

    async def _report(self, report: GateReport) -> None:
        digest = report.adapter
        self._look_at_key()
        if self.problem is not None:
            # The key was revoked during the trial: the next gate begins it anew.
            return
        gated = AdapterGated(adapter=digest, report=report, key_id=self._key.key_id, signature=self._key.sign(report))
        where = await self._publisher.publish(ADAPTERS.name, digest, gated, subject=digest)
        log.info("trial.reported", adapter=digest, passed=report.passed, problems=report.problems)
        await self._view.wait_until(lambda: self._registry.positions.get(ADAPTERS.name, 0) > where.offset, RETRY_S)


async def _unless(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work, or give it up when the process is told to stop."""
    working, told = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working
