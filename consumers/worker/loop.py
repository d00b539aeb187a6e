"""The worker's loop: poll, take in, schedule, run, finish. It decides nothing that a pure room could decide."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from consumers.engines.protocol import EngineDead
from consumers.worker.adapters import Adapters, Unloadable
from consumers.worker.doors import Doors
from consumers.worker.execution import Closing, Executor, HandedOver
from consumers.worker.intake import Intake, parts_of
from consumers.worker.lanes import Lanes
from consumers.worker.loading import Loads
from consumers.worker.plan import Entry, Start
from consumers.worker.presence import Presence
from consumers.worker.run import Run, Runs
from consumers.worker.scheduler import Scheduler
from consumers.worker.stream import Streams
from consumers.worker.verify import standing
from consumers.worker.watermark import MemoryWatch
from infra.kafka.group import Group
from infra.kafka.lane import Lane, LaneLost
from infra.kafka.records import Incoming
from infra.logs import ActionLog
from schemas.adapters import AdapterRevoked
from schemas.jobs import Outcome, RequestCancelled, tenant_job
from schemas.record import Record
from schemas.replies import FailedOutcome
from schemas.tenants import TenantConfigured
from schemas.topics import REQUESTS

log = ActionLog("worker")

POLL_MS = 50
# Deadlines of queued jobs and turns are looked at this often; everything else wakes the scheduler itself.
TICK_S = 0.1
# A view that was whole this recently is whole. After the second bound nothing starts, after the third what runs is
# given up (design section 5).
FRESH_MS = 1_000
STALE_S = 4.0
STALE_ABORT_S = 30.0
WATCH_S = 0.25
# A revoked adapter's running jobs may end by themselves for this long, then they are aborted.
REVOKE_DRAIN_S = 2.0
# An orderly stop lets running jobs end for this long, then hands them over.
STOP_DRAIN_S = 20.0
QUARANTINED = ("adapter_quarantined", "this adapter failed on this worker and is not tried again")


class Worker:
    """Executes the routes of the partitions it owns."""

    def __init__(self, doors: Doors, tasks: asyncio.TaskGroup) -> None:
        self.doors = doors
        self.adapters = Adapters(doors)
        self.presence = Presence(doors)
        self.lanes = Lanes(doors.worker, doors.metrics, doors.clock, doors.failpoints)
        self._tasks = tasks
        self._streams = Streams(doors.publisher, doors.metrics)
        self._executor = Executor(doors, self.adapters, self._streams)
        build = doors.engine.build
        self._scheduler = Scheduler(
            open_max=build.slots if build.mixes_adapters else 1, rows=build.rows, parts=parts_of(doors.registry)
        )
        self._intake = Intake(doors, self.adapters)
        self._runs = Runs()
        self._admitting: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loads = Loads(
            self.adapters, self._scheduler, self._runs, doors.clock, tasks, self._wake.set, self._not_loaded
        )
        self._memory = MemoryWatch(doors, self.adapters, self._allow_rows)
        self._stopping = asyncio.Event()
        self._fresh_at = doors.clock.monotonic()

    async def run(self, group: Group) -> None:
        """Work until `stop` is called and everything in hand has ended. Raises what no retry can mend."""
        works = (self._streams.run(), self.presence.run(), self._watch(), self._schedule(), self._memory.run())
        helpers = [self._tasks.create_task(work) for work in works]
        await group.start([REQUESTS.of(self.doors.pool)])
        helpers += [self._tasks.create_task(self._poll(group))]
        await self._stopping.wait()
        await self._drain(group)
        for helper in (*helpers, *self._admitting):
            helper.cancel()
        for lane in self.lanes.owned:
            self.lanes.close(lane)

    def stop(self) -> None:
        """Start nothing more, let running jobs end, hand over what does not."""
        self._stopping.set()

    @property
    def not_ready(self) -> str | None:
        """What this worker waits for before it serves, or None."""
        if self._stopping.is_set():
            return "stopping"
        if not self.doors.engine.healthy():
            return "the engine is not healthy"
        if self._stale_s() > STALE_S:
            return "the registry view is stale"
        return None if self.lanes.owned else "no partition is owned"

    async def lanes_opened(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self.lanes.open(lane, self._tasks, self.lanes_lost)
        self.presence.serve(self.lanes.partitions)

    async def lanes_lost(self, lanes: Sequence[Lane]) -> None:
        """Another worker may own these already: stop what runs, say so to the ledger, commit nothing."""
        gone = set(lanes)
        for lane in gone:
            lane.lost = True
            self.lanes.close(lane)
        left = [entry for entry in self._scheduler.queued if self.lanes.held(entry)[0] in gone]
        self._scheduler.withdraw(left)
        for entry in left:
            self.lanes.let_go(entry, self.lanes.held(entry)[0])
        self._executor.give_up([run for run in self._runs if run.lane in gone])
        self.presence.serve(self.lanes.partitions)

    def cancelled(self, record: RequestCancelled) -> None:
        """A tenant took a job back. The ledger knew first, so a job that is not here yet will not begin."""
        self._end_early(lambda e: e.name == tenant_job(record.identity.tenant, record.job_id), Outcome.CANCELLED)

    def registry_changed(self, record: Record) -> None:
        if isinstance(record, AdapterRevoked):
            self._tasks.create_task(self._revoke(record.adapter))
        if isinstance(record, TenantConfigured):
            self._scheduler.parts = parts_of(self.doors.registry)

    async def _poll(self, group: Group) -> None:
        while True:
            for lane, records in (await group.poll(POLL_MS)).items():
                taken = [record for record in records if self.lanes.take(lane, record)]
                self.doors.metrics.count("records_consumed", len(taken))
                for record in taken:
                    task = self._tasks.create_task(self._admit(lane, record))
                    self._admitting.add(task)
                    task.add_done_callback(self._admitting.discard)

    async def _admit(self, lane: Lane, record: Incoming) -> None:
        verdict = await self._intake.read(record)
        if lane.lost:
            return
        if not isinstance(verdict, Entry):
            self.lanes.refuse(lane, record, verdict.reason, verdict.detail)
            return
        self.lanes.hold(lane, record)
        if standing(verdict.route, self.doors.registry, self.doors.base, self.doors.clock.now_ms()) is None:
            self._scheduler.add(verdict)
            self._wake.set()
        else:
            # Authentic, but not to be executed: it ends with its outcome, without waiting for a turn.
            self._spawn(verdict)

    async def _schedule(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._tick(self.doors.clock.monotonic())

    def _tick(self, now: float) -> None:
        self._end_early(lambda entry: entry.expires_at <= now, Outcome.EXPIRED, queued_only=True)
        self._end_early(
            lambda entry: self.adapters.is_quarantined(entry.digest), Outcome.FAILED, QUARANTINED, queued_only=True
        )
        if not self._stopping.is_set() and self._stale_s() <= STALE_S:
            self._follow_plan(now)
        self._loads.expel()
        self.doors.metrics.set("jobs_queued", self._scheduler.queued_count)
        self.doors.metrics.set("jobs_running", len(self._scheduler.running))

    def _follow_plan(self, now: float) -> None:
        plan = self._scheduler.plan(now, self.adapters.usable(), self.adapters.in_host())
        for start in plan.start:
            self._scheduler.withdraw([start.entry])
            self._scheduler.started(start.entry)
            self.adapters.used(start.entry.digest)
            self._spawn(start.entry, start=start)
        self._loads.follow(plan.load, plan.prefetch)

    def _not_loaded(self, digest: str, error: Unloadable) -> None:
        """Every job that waits for an adapter that cannot be had ends, and hears why."""
        reason: FailedOutcome = Outcome.REVOKED if error.code == "adapter_revoked" else Outcome.FAILED
        self._end_early(lambda e: e.digest == digest, reason, (error.code, str(error)), queued_only=True)

    def _allow_rows(self, rows: int) -> None:
        self._scheduler.rows = rows
        self.presence.allow(rows)

    def _spawn(
        self,
        entry: Entry,
        reason: FailedOutcome | None = None,
        problem: tuple[str, str] | None = None,
        start: Start | None = None,
    ) -> None:
        lane, record = self.lanes.held(entry)
        run = Run(entry=entry, lane=lane, carried=record.carried(), reason=reason, problem=problem, start=start)
        run.started_at = self.doors.clock.monotonic()
        self._runs.add(run)
        self._tasks.create_task(self._execute(run))

    async def _execute(self, run: Run) -> None:
        try:
            ending = await self._executor.run(run)
        except HandedOver:
            self._put_back(run)
        except LaneLost:
            self.lanes.let_go(run.entry, run.lane)
            await self.lanes_lost([run.lane])
        except EngineDead:
            await self._executor.abandon(list(self._runs))
            raise
        else:
            closing = ending if isinstance(ending, Closing) else None
            self.lanes.finish(run.entry, run.lane, closing.records if closing else (), bool(closing and closing.poison))
        finally:
            if self._runs.remove(run):
                self._scheduler.ended(run.entry, run.usage.completion_tokens)
            self._wake.set()
            await self._runs.changed()

    def _put_back(self, run: Run) -> None:
        """What was handed over begins again here, alone if that was the reason, unless its lane or this worker goes."""
        if run.lane.lost or self._stopping.is_set():
            self.lanes.let_go(run.entry, run.lane)
            return
        self._scheduler.add_first(run.entry if run.hand_over else replace(run.entry, alone=True))

    def _end_early(
        self,
        which: Callable[[Entry], bool],
        reason: FailedOutcome,
        problem: tuple[str, str] | None = None,
        queued_only: bool = False,
    ) -> int:
        """End jobs before their time: queued ones without touching the engine, running ones by an abort.

        Returns how many running ones were aborted.
        """
        queued = [entry for entry in self._scheduler.queued if which(entry)]
        self._scheduler.withdraw(queued)
        for entry in queued:
            self._spawn(entry, reason, problem)
        running = [] if queued_only else self._runs.of(which)
        for run in running:
            self._executor.stop(run, reason, problem)
        return len(running)

    async def _revoke(self, digest: str) -> None:
        """Refuse what waits, let what runs end or abort it, take the adapter out, and leave a receipt."""
        self._end_early(lambda entry: entry.digest == digest, Outcome.REVOKED, queued_only=True)
        await self._runs.until_idle(REVOKE_DRAIN_S, digest)
        aborted = self._end_early(lambda entry: entry.digest == digest, Outcome.REVOKED)
        await self._runs.until_idle(None, digest)
        await self.adapters.drain(digest, aborted)
        self._wake.set()

    async def _watch(self) -> None:
        while True:
            if await self.doors.view.fresh(FRESH_MS):
                self._fresh_at = self.doors.clock.monotonic()
            elif self._stale_s() > STALE_ABORT_S:
                # A revocation may have been missed: what runs begins again when the view is whole.
                self._executor.give_up(list(self._runs))
            self.doors.metrics.set("registry_stale_seconds", self._stale_s())
            if not self.doors.engine.healthy():
                await self._executor.abandon(list(self._runs))
                raise EngineDead
            await asyncio.sleep(WATCH_S)

    def _stale_s(self) -> float:
        return self.doors.clock.monotonic() - self._fresh_at

    async def _drain(self, group: Group) -> None:
        for lane in self.lanes.owned:
            group.pause(lane)
        await self._runs.until_idle(STOP_DRAIN_S)
        self._executor.give_up(list(self._runs))
        await self._runs.until_idle(STOP_DRAIN_S)
        await self.lanes.drained()
        await self.adapters.close()
        await self.presence.gone()
