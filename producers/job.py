"""One submitted job, as its client holds it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import TypeVar

from producers.preview import Event, Preview, Reset, Waiting
from schemas.errors import SwitchyardError
from schemas.jobs import JobClass, JobSubmitted, RejectReason
from schemas.record import Coordinates
from schemas.replies import FinalReply, JobCompleted, JobRejected, TokensGenerated

# Replies that came before the broker acknowledged the job, and so before its place is known.
EARLY_REPLIES_MAX = 16
# These are about one record, and no other of the same id.
OF_ONE_RECORD = frozenset({
    RejectReason.INVALID_RECORD, RejectReason.JOB_ID_REUSED, RejectReason.TENANT_MISMATCH, RejectReason.IMPERSONATION,
})  # fmt: skip

Result = TypeVar("Result")


class JobNotCompleted(SwitchyardError):
    """The job ended otherwise than completed. `reply` says how."""

    def __init__(self, reply: FinalReply) -> None:
        outcome = reply.reason if isinstance(reply, JobRejected) else getattr(reply, "outcome", "completed")
        super().__init__(f"job {reply.job_id}: {outcome}: {getattr(reply, 'message', '')}")
        self.reply = reply


class JobUnanswered(SwitchyardError):
    """No final reply came within the job's deadline and some time after it."""


class Verdict(Enum):
    """What a reply means for a job."""

    FINAL = "final"
    TRY_AGAIN = "try again"
    NOT_OURS = "not ours"


def verdict(reply: FinalReply, place: Coordinates | None) -> Verdict:
    """Whether a reply that names the job's id answers it. `place` is that of the record submitted last.

    A job and a lasting refusal are remembered by id, so one for an earlier record of the id answers this one too.
    A refusal of one record answers that record alone.
    """
    if isinstance(reply, JobRejected):
        if reply.ingress != place and (reply.retryable or reply.reason in OF_ONE_RECORD):
            return Verdict.NOT_OURS
        return Verdict.TRY_AGAIN if reply.retryable else Verdict.FINAL
    return Verdict.FINAL


class Job:
    """Iterate over it for pieces of text as they are generated; `result` is the truth.

    One reader at a time. A reader that is slow, or gone, holds nobody up.
    """

    def __init__(
        self,
        record: JobSubmitted,
        job_class: JobClass,
        cancel: Callable[[str], Awaitable[object]],
        retry_s: float,
        answer_s: float,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.record = record
        self.job_class = job_class
        self.retry_by = now + retry_s
        # The place of the record submitted last; None until the broker acknowledged it.
        self.place: Coordinates | None = None
        self.early: list[JobRejected] = []
        self._cancel = cancel
        self._preview = Preview()
        self._news = asyncio.Event()
        self._final: asyncio.Future[FinalReply] = asyncio.get_running_loop().create_future()
        self._answer_by = now + answer_s

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def done(self) -> bool:
        return self._final.done()

    async def events(self) -> AsyncIterator[Event]:
        """Tokens, a Reset where what was given before is void, what is waited for. Ends after the final reply."""
        done = False
        while not done:
            self._news.clear()
            done = self._final.done()
            for event in self._preview.drain():
                yield event
            if not done:
                await self._within_bound(self._news.wait())
        self._final.result()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of one text. After a crash, an attempt that repeats what was given goes on behind it; one that takes
        another way begins on a new line. `events` says so in types."""
        given = current = ""
        async for event in self.events():
            if isinstance(event, Waiting):
                continue
            if isinstance(event, Reset):
                current = ""
                continue
            current += event.text
            if given.startswith(current):
                continue
            yield current[len(given) :] if current.startswith(given) else f"\n{current}"
            given = current

    async def result(self, *, raise_for_failure: bool = False) -> FinalReply:
        """The final reply. Raises JobUnanswered, and JobNotCompleted where asked to."""
        reply = await self._within_bound(asyncio.shield(self._final))
        if raise_for_failure and not isinstance(reply, JobCompleted):
            raise JobNotCompleted(reply)
        return reply

    async def cancel(self) -> None:
        """Take the job back. Its final reply says what became of it: it may have completed before."""
        await self._cancel(self.job_id)

    def hurry(self, passed_s: float) -> bool:
        """Take the time that passed off the deadline, for the broker counts it anew. False when none is left."""
        left_ms = int((self.retry_by - asyncio.get_running_loop().time() - passed_s) * 1000)
        if left_ms > 0 and self.record.deadline_ms is not None:
            self.record = self.record.model_copy(update={"deadline_ms": left_ms})
        return left_ms > 0

    def take_notice(self, message: str) -> None:
        self._preview.wait(message)
        self._news.set()

    def take_chunk(self, chunk: TokensGenerated) -> None:
        self._preview.take(chunk)
        self._news.set()

    def finish(self, reply: FinalReply) -> None:
        if self._final.done():
            return
        if not isinstance(reply, JobRejected):
            self._preview.finish(reply.text, reply.receipt.attempt)
        self._final.set_result(reply)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """No reply can reach this job any more."""
        if self._final.done():
            return
        self._final.set_exception(error)
        # Read once, so that a job nobody awaits makes no noise.
        self._final.exception()
        self._news.set()

    async def _within_bound(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout_at(self._answer_by):
                return await work
        except TimeoutError as error:
            raise JobUnanswered from error
