"""Plays router and worker on the real Kafka: answers a tenant's jobs as a script says, without engine or ledger."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from infra.clock import SystemClock
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming, Outgoing
from infra.kafka.tail import Tail
from infra.launch.stack import Stack
from schemas.digest import digest_of
from schemas.errors import InvalidRecord
from schemas.jobs import JobCancelled, JobSubmitted, Outcome, RejectReason
from schemas.record import Coordinates, Identity, Record
from schemas.replies import FinishReason, JobCompleted, JobFailed, JobRejected, Receipt, TokensGenerated, Usage
from schemas.topics import BATCH, CANCEL, JOBS, REPLIES, STREAM


def digest(name: str) -> str:
    return digest_of(name.encode())


@dataclass(frozen=True)
class Asked:
    """One record that the tenant appended, and the how-manieth of its job id it is, from 1."""

    job: JobSubmitted
    place: Coordinates
    tenant: str
    times: int

    def receipt(self, attempt: int = 1) -> Receipt:
        identity = Identity(
            tenant=self.tenant, base=digest("base"), adapter=digest(self.job.alias), tokenizer=digest("tokenizer")
        )
        return Receipt(identity=identity, attempt=attempt, fence="1.0", engine="fake-1")

    def chunk(self, text: str, seq: int, attempt: int = 1) -> TokensGenerated:
        return TokensGenerated(job_id=self.job.job_id, attempt=attempt, seq=seq, text=text, tokens=1)

    def completed(self, text: str, attempt: int = 1, place: Coordinates | None = None) -> JobCompleted:
        return JobCompleted(
            job_id=self.job.job_id,
            ingress=place or self.place,
            receipt=self.receipt(attempt),
            text=text,
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=3, completion_tokens=2),
            chunks=0,
            text_hash=digest_of(text.encode()),
        )

    def failed(self, outcome: Outcome, text: str = "") -> JobFailed:
        return JobFailed.model_validate(
            {
                "job_id": self.job.job_id,
                "ingress": self.place,
                "receipt": self.receipt(),
                "outcome": outcome,
                "code": outcome.value,
                "message": f"the job {outcome.value}",
                "text": text,
                "usage": Usage(prompt_tokens=3),
                "chunks": 0,
            }
        )

    def rejected(
        self, reason: RejectReason, retry_after_ms: int | None = None, place: Coordinates | None = None
    ) -> JobRejected:
        return JobRejected(
            tenant=self.tenant,
            job_id=self.job.job_id,
            ingress=place or self.place,
            reason=reason,
            message=f"refused: {reason.value}",
            retryable=retry_after_ms is not None,
            retry_after_ms=retry_after_ms,
        )


Script = Callable[[Asked], Sequence[Record]]


def echo(asked: Asked) -> Sequence[Record]:
    """Two chunks and the whole: the prompt, in angle brackets."""
    text = asked.job.prompt or (asked.job.messages or ())[-1].content
    return (asked.chunk("<", 0), asked.chunk(f"{text}>", 1), asked.completed(f"<{text}>"))


@dataclass
class Answering:
    """Answers while it is entered. `asked` is every job seen, in order; `cancelled` every id taken back."""

    stack: Stack
    tenant: str
    script: Script = echo
    # Between two answers, so that a test can interrupt in the midst of many.
    pause_s: float = 0
    asked: list[Asked] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        clock = SystemClock()
        topics = [topic.of(self.tenant) for topic in (JOBS, BATCH, CANCEL)]
        self._due: asyncio.Queue[Sequence[Record]] = asyncio.Queue()
        self._publisher = Publisher(self.stack.kafka("worker"), "answering", clock)
        self._tail = Tail(self.stack.kafka("router"), topics, self._take, clock)
        await self._publisher.start()
        await self._tail.start()
        self._tasks = [asyncio.create_task(self._tail.run()), asyncio.create_task(self._answer())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tail.stop()
        await self._publisher.stop()

    async def say(self, *records: Record) -> None:
        """Append records to the tenant's stream or replies now."""
        for record in records:
            topic = STREAM if isinstance(record, TokensGenerated) else REPLIES
            await self._publisher.publish(topic.of(self.tenant), str(getattr(record, "job_id", "")), record)

    async def say_raw(self, topic: str, key: str, value: bytes | None) -> None:
        """Append bytes that are no record."""
        await self._publisher.send_all([Outgoing(topic=topic, key=key.encode(), value=value)])

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        """Wait for something that a tenant's record brings about."""
        assert await self._tail.wait_until(condition, timeout_s)

    def _take(self, record: Incoming) -> None:
        if record.topic == CANCEL.of(self.tenant):
            self.cancelled.append(JobCancelled.decode(record.value).job_id)
            return
        try:
            job = JobSubmitted.decode(record.value)
        except InvalidRecord:
            return
        times = 1 + sum(asked.job.job_id == job.job_id for asked in self.asked)
        self.asked.append(Asked(job, record.coordinates, self.tenant, times))
        self._due.put_nowait(self.script(self.asked[-1]))

    async def _answer(self) -> None:
        while True:
            await self.say(*await self._due.get())
            await asyncio.sleep(self.pause_s)
