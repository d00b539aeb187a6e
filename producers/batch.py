"""Run a batch file: submit its lines as batch jobs, write their replies as they come, resume where it stopped."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from infra.clock import Clock
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Tail, end_offsets
from infra.logs import ActionLog
from infra.settings import KafkaSettings
from producers.batch_files import BatchRefused, Input, Place, Results, State
from producers.client import RETRY_AFTER_MS, random_job_id
from producers.impersonation import BadGrant
from producers.openai import answer_line, refusal_line
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.jobs import DEADLINE_MS_MAX, JobCancelled, JobSubmitted, RejectReason
from schemas.record import decode_one_of
from schemas.replies import FINAL_REPLIES, FinalReply, JobRejected
from schemas.topics import BATCH, CANCEL, REPLIES

log = ActionLog("batch")

# Jobs wait in the tenant's topic, so only what is on its way there is held here.
SUBMIT_JOBS_MAX = 100
SUBMIT_LINGER_MS = 5
# Every job has a deadline within a day: without an answer by then, something is wrong.
ANSWER_S = DEADLINE_MS_MAX / 1000 + 600
BAD_LINE_STATUS = 400
# An append takes its time, and the broker's clock decides whether the grant was in force.
GRANT_LEFT_MS_MIN = 5_000


class BatchStalled(SwitchyardError):
    """Lines are unanswered although their deadlines passed. Run the same command again to go on."""


async def open_batch(settings: KafkaSettings, tenant: str, source: Input, out: Path, errors: Path) -> State:
    """The state of the batch that was begun under `out`, or a new one. Paths are absolute. Raises BatchRefused."""
    state, acting = State.load(out), source.grant is not None
    if state is None:
        if any(path.exists() and path.stat().st_size for path in (out, errors)):
            raise BatchRefused(f"{out} or {errors} exists and is no unfinished batch; choose other names")
        replies = await end_offsets(settings, REPLIES.of(tenant))
        state = State(input=source.digest, tenant=tenant, acting=acting, errors=errors, replies=replies)
        state.save(out)
    if (state.input, state.tenant, state.acting, state.errors) != (source.digest, tenant, acting, errors):
        raise BatchRefused(
            f"the batch under {out} was begun with another input file, tenant, error file or way in (--tenant or "
            f"--as-tenant); give those to resume it, or choose another --out"
        )
    return state


class BatchRun:
    """One run over one batch, from wherever the last one stopped. `progress` is called after every line."""

    def __init__(
        self,
        settings: KafkaSettings,
        clock: Clock,
        source: Input,
        state: State,
        results: Results,
        progress: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._source = source
        self._state = state
        self._results = results
        self._progress = progress
        self._tenant = state.tenant
        topic = REPLIES.of(self._tenant)
        places = {(topic, partition): offset for partition, offset in state.replies.items()}
        self._tail = Tail(settings, (topic,), self._apply, clock, places=places)
        name = f"batch.{self._tenant}.{random_job_id()[:8]}"
        self._publisher = Publisher(settings, name, clock, linger_ms=SUBMIT_LINGER_MS)
        self._refused: asyncio.Queue[tuple[int, float]] = asyncio.Queue(maxsize=len(source.good))
        self._waiting: set[int] = set()
        self._caught_up = False
        self._finished = asyncio.Event()

    async def run(self, *, cancel_on_interrupt: bool = False) -> None:
        """Return when every line is in the output or the error file."""
        self._write_bad_lines()
        try:
            await self._publisher.start()
            await self._tail.start()
            self._caught_up = True
            await self._run_rest()
        except asyncio.CancelledError:
            if cancel_on_interrupt:
                await self._take_back()
            raise
        finally:
            await self._tail.stop()
            await self._publisher.stop()

    async def _run_rest(self) -> None:
        """Submit what has no answer, and read answers meanwhile. What ends the reading ends the run."""
        self._check_finished()
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(work) for work in (self._tail.run(), self._submit_refused())]
                await self._submit()
                await self._wait_finished()
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _submit(self) -> None:
        open_places = (place for number, place in self._source.good.items() if number not in self._results.done)
        while chunk := tuple(islice(open_places, SUBMIT_JOBS_MAX)):
            await self._append_jobs(chunk)

    async def _submit_refused(self) -> None:
        """Submit lines again that were refused for want of a place, each after the time the router asked for."""
        loop = asyncio.get_running_loop()
        while True:
            number, due = await self._refused.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._waiting.discard(number)
            if number not in self._results.done:
                await self._append_jobs([self._source.good[number]])

    async def _wait_finished(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._finished.wait()
        except TimeoutError as error:
            raise BatchStalled from error

    async def _take_back(self) -> None:
        """Cancel every line without an answer. Their replies are written when the batch is resumed."""
        open_ids = (self._state.job_id(number) for number in self._source.good if number not in self._results.done)
        while chunk := tuple(islice(open_ids, SUBMIT_JOBS_MAX)):
            await self._append(CANCEL.of(self._tenant), [JobCancelled(job_id=job_id) for job_id in chunk])

    async def _append_jobs(self, places: Sequence[Place]) -> None:
        """Raises BadGrant rather than submit jobs that would be refused for their grant."""
        grant = self._source.grant
        if grant is not None and self._clock.now_ms() > grant.impersonation.expires_at_ms - GRANT_LEFT_MS_MIN:
            raise BadGrant(
                "the grant ends before every line is submitted; those that were go on. "
                "Run the same command with a new grant to resume"
            )
        await self._append(BATCH.of(self._tenant), [self._job(place) for place in places])

    def _job(self, place: Place) -> JobSubmitted:
        return self._source.job(place, self._state.job_id(place.origin.number))

    async def _append(self, topic: str, records: Sequence[JobSubmitted | JobCancelled]) -> None:
        await self._publisher.send_all([self._publisher.outgoing(topic, r.job_id, r) for r in records])

    def _write_bad_lines(self) -> None:
        for origin, error in self._source.bad:
            if origin.number in self._results.done:
                continue
            job_id = self._state.job_id(origin.number)
            message = f"line {origin.number}: {error}"
            line = refusal_line(origin, job_id, BAD_LINE_STATUS, message, param=error.param)
            self._results.add(origin.number, False, line)
            self._progress()

    def _apply(self, record: Incoming) -> None:
        number = self._state.number_of((record.key or b"").decode(errors="replace"))
        if number is None or number not in self._source.good or number in self._results.done:
            return
        try:
            reply = decode_one_of(FINAL_REPLIES, record.value)
        except InvalidRecord:
            log.warning("reply.skipped", place=str(record.coordinates))
            return
        assert isinstance(reply, FinalReply)
        if reply.job_id == self._state.job_id(number):
            self._take(number, reply, record.timestamp_ms)

    def _take(self, number: int, reply: FinalReply, timestamp_ms: int) -> None:
        if isinstance(reply, JobRejected) and reply.retryable:
            # One of an earlier run: this run submits every open line anyway.
            if self._caught_up and number not in self._waiting:
                self._waiting.add(number)
                wait_s = (reply.retry_after_ms or RETRY_AFTER_MS) / 1000
                self._refused.put_nowait((number, asyncio.get_running_loop().time() + wait_s))
            return
        if self._state.acting and isinstance(reply, JobRejected) and reply.reason is RejectReason.JOB_ID_REUSED:
            # Submitted before, under a former grant: what became of that job is this line's answer.
            return
        place = self._source.good[number]
        completed, line = answer_line(place.origin, self._state.job_id(number), reply, timestamp_ms // 1000)
        self._results.add(number, completed, line)
        self._progress()
        self._check_finished()

    def _check_finished(self) -> None:
        if len(self._results.done) == self._source.lines:
            self._finished.set()
