"""JobClient: submit jobs, follow their tokens, get their final replies, take them back.

It needs nothing but a tenant's own rights: write its three topics, read its two, and no consumer group.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from infra.clock import Clock, SystemClock
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Tail
from infra.logs import ActionLog
from infra.settings import KafkaSettings
from producers.job import EARLY_REPLIES_MAX, Job, Verdict, verdict
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.ids import parse_tenant
from schemas.jobs import DEADLINE_MS_MAX, JobCancelled, JobClass, JobSubmitted, Message, OnInterrupt, Parameters
from schemas.record import RECORD_BYTES_MAX, Record, decode_one_of, describe
from schemas.replies import FINAL_REPLIES, FinalReply, JobRejected, JobWaiting, TokensGenerated
from schemas.topics import BATCH, CANCEL, JOBS, REPLIES, STREAM

log = ActionLog("client")

# Open jobs of one client; a further one waits until one of them ends.
OPEN_JOBS_MAX = 10_000
# How long refusals for want of a place are answered with a new try, where the job names no deadline of its own.
RETRY_MS_MAX = 120_000
RETRY_AFTER_MS = 1_000
# A lease outlives its deadline a little, and a reply takes its way.
ANSWER_GRACE_S = 60.0
TOPIC_OF_CLASS = {JobClass.INTERACTIVE: JOBS, JobClass.BATCH: BATCH}


class ClientClosed(SwitchyardError):
    """The client is closed or lost its connection; the job goes on without it."""


class JobIdOpen(SwitchyardError):
    """This client has an open job of that id already."""


def random_job_id() -> str:
    return secrets.token_hex(16)


class JobClient:
    """One tenant's way in. Use it as `async with JobClient(settings, tenant) as client`.

    `retry` submits a job again that was refused for want of a place, after the time the router asked for and until
    the job's deadline; without it such a refusal is the job's final reply.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        tenant: str,
        clock: Clock | None = None,
        *,
        retry: bool = True,
        new_id: Callable[[], str] = random_job_id,
    ) -> None:
        self.tenant = parse_tenant(tenant)
        self._new_id = new_id
        self._retry = retry
        clock = clock or SystemClock()
        self._publisher = Publisher(settings, f"client.{tenant}.{random_job_id()[:8]}", clock)
        self._stream, self._replies = STREAM.of(tenant), REPLIES.of(tenant)
        self._tail = Tail(settings, (self._stream, self._replies), self._apply, clock, from_end=True)
        self._jobs: dict[str, Job] = {}
        self._places = asyncio.Semaphore(OPEN_JOBS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._publisher.start()
            await self._tail.start()
        except BaseException:
            await self._close_connections()
            raise
        self._spawn(self._tail.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(ClientClosed())
        await self._close_connections()

    async def submit(
        self,
        *,
        alias: str,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        prompt: str | None = None,
        parameters: Parameters | None = None,
        job_class: JobClass = JobClass.INTERACTIVE,
        session_id: str | None = None,
        deadline_ms: int | None = None,
        on_interrupt: OnInterrupt = OnInterrupt.RERUN,
        job_id: str | None = None,
    ) -> Job:
        """Append a job and wait until the broker has it. Raises InvalidRecord before anything is sent.

        After KafkaTimeout the job may be there or not: submit it again under the same `job_id`, it stays one job.
        """
        fields: dict[str, Any] = {
            "job_id": job_id or self._new_id(),
            "alias": alias,
            "messages": None if messages is None else tuple(map(_message, messages)),
            "prompt": prompt,
            "parameters": parameters or Parameters(),
            "session_id": session_id,
            "deadline_ms": deadline_ms,
            "on_interrupt": on_interrupt,
        }
        return await self.submit_record(make_record(fields), job_class)

    async def submit_record(self, record: JobSubmitted, job_class: JobClass) -> Job:
        """Append a job that was made elsewhere."""
        await self._places.acquire()
        if self._closed or record.job_id in self._jobs:
            self._places.release()
            raise ClientClosed if self._closed else JobIdOpen
        retry_s = (record.deadline_ms or RETRY_MS_MAX) / 1000
        answer_s = (record.deadline_ms or RETRY_MS_MAX + DEADLINE_MS_MAX) / 1000 + ANSWER_GRACE_S
        job = self._jobs[record.job_id] = Job(record, job_class, self.cancel, retry_s, answer_s)
        try:
            await self._append(job)
        except BaseException:
            self._forget(job)
            raise
        return job

    async def cancel(self, job_id: str) -> None:
        """Take a job of this tenant back, whoever submitted it. Raises InvalidRecord."""
        try:
            record = JobCancelled(job_id=job_id)
        except ValidationError as error:
            raise InvalidRecord(describe(error)) from error
        await self._publisher.publish(CANCEL.of(self.tenant), job_id, record)

    async def _append(self, job: Job) -> None:
        topic = TOPIC_OF_CLASS[job.job_class].of(self.tenant)
        job.place = await self._publisher.publish(topic, job.job_id, job.record)
        early, job.early = job.early, []
        for reply in early:
            self._answer(job, reply)

    def _apply(self, record: Incoming) -> None:
        job = self._jobs.get((record.key or b"").decode(errors="replace"))
        if job is None:
            return
        try:
            if record.topic == self._stream:
                self._take_preview(job, decode_one_of(STREAM.records, record.value))
            else:
                reply = decode_one_of(FINAL_REPLIES, record.value)
                assert isinstance(reply, FinalReply)
                self._take_reply(job, reply)
        except InvalidRecord:
            # Written by a newer Switchyard, perhaps. One record must not cost the other jobs their replies.
            log.warning("reply.skipped", place=str(record.coordinates))

    def _take_preview(self, job: Job, record: Record) -> None:
        match record:
            case TokensGenerated() if record.job_id == job.job_id:
                job.take_chunk(record)
            case JobWaiting() if record.ingress == job.place:
                job.take_notice(record.message)

    def _take_reply(self, job: Job, reply: FinalReply) -> None:
        if reply.job_id == job.job_id:
            self._answer(job, reply)

    def _answer(self, job: Job, reply: FinalReply) -> None:
        meaning = verdict(reply, job.place)
        if meaning is Verdict.FINAL:
            self._finish(job, reply)
            return
        assert isinstance(reply, JobRejected)
        if meaning is Verdict.TRY_AGAIN:
            self._refused(job, reply)
        elif job.place is None and len(job.early) < EARLY_REPLIES_MAX:
            job.early.append(reply)

    def _refused(self, job: Job, refusal: JobRejected) -> None:
        wait_s = (refusal.retry_after_ms or RETRY_AFTER_MS) / 1000
        if not self._retry or not job.hurry(wait_s):
            self._finish(job, refusal)
            return
        job.take_notice(f"{refusal.message} (trying again in {wait_s:.0f} s)")
        # A refusal that is delivered twice must not submit twice.
        job.place = None
        self._spawn(self._append_later(job, wait_s))

    async def _append_later(self, job: Job, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if not job.done:
            await self._append(job)

    def _finish(self, job: Job, reply: FinalReply) -> None:
        job.finish(reply)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        if self._jobs.pop(job.job_id, None) is not None:
            self._places.release()

    def _fail_all(self, error: SwitchyardError) -> None:
        self._closed = True
        for job in tuple(self._jobs.values()):
            job.fail(error)
            self._forget(job)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # No reply can reach the open jobs from here on: none of them may wait for one.
            self._fail_all(ClientClosed(f"the client lost Kafka: {error!r}"))

    async def _close_connections(self) -> None:
        await self._tail.stop()
        await self._publisher.stop()


def _message(message: Message | Mapping[str, str]) -> Message | dict[str, str]:
    return message if isinstance(message, Message) else dict(message)


def make_record(fields: Mapping[str, Any]) -> JobSubmitted:
    """A job from its fields, none of which was checked. Raises InvalidRecord that says what to mend."""
    try:
        record = JobSubmitted.model_validate(fields)
    except ValidationError as error:
        raise InvalidRecord(describe(error)) from error
    size = len(record.encode())
    if size > RECORD_BYTES_MAX:
        raise InvalidRecord(f"the job has {size} bytes; at most {RECORD_BYTES_MAX} are taken")
    return record
