"""A job on its way through the engine: what is known of it, how it may end early, and all that run now."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from consumers.worker.plan import Entry, Start
from consumers.worker.replies import Result
from infra.kafka.lane import Lane
from infra.kafka.records import Headers
from schemas.jobs import Outcome
from schemas.record import Coordinates
from schemas.replies import FailedOutcome, Usage
from schemas.service import Batch, Service

MESSAGES: dict[FailedOutcome, tuple[str, str]] = {
    Outcome.CANCELLED: ("cancelled", "the job was cancelled"),
    Outcome.EXPIRED: ("deadline_passed", "the job's deadline passed"),
    Outcome.REVOKED: ("adapter_revoked", "the job's adapter was revoked"),
    Outcome.INTERRUPTED: ("interrupted", "the worker died while the job ran, and the job asked not to be run again"),
    Outcome.FAILED: ("failed", "the job failed"),
}


@dataclass(kw_only=True)
class Run:
    """An entry on its way through the engine, and the ways to end it early."""

    entry: Entry
    lane: Lane
    # Headers of its request that every record about it carries on: a client's correlation id, the trace.
    carried: Headers = ()
    # Why it shall end before its time; `hand_over` leaves it to the next execution instead.
    reason: FailedOutcome | None = None
    problem: tuple[str, str] | None = None
    hand_over: bool = False
    # The attempt that was begun in the ledger; 0 before.
    attempt: int = 0
    request_id: str = ""
    # How it came to start; None where it ended before that. Times are the clock's monotonic ones.
    start: Start | None = None
    started_at: float = 0.0
    first_at: float | None = None
    last_at: float | None = None
    text: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    # The step that made its first token, where the engine can tell.
    batch: Batch | None = None

    @property
    def stopped(self) -> bool:
        return self.hand_over or self.reason is not None

    def service(self, now: float) -> Service | None:
        """How it was served, until now."""
        if self.start is None:
            return None
        came, tokens = self.entry.queued_at, self.usage.completion_tokens
        decode_s = self.last_at - self.first_at if self.first_at is not None and self.last_at is not None else 0.0
        return Service(
            residency=self.entry.residency,
            waited_for=self.start.waited_for,
            queue_ms=_ms(self.started_at - came),
            load_ms=self.start.load_ms,
            first_token_ms=_ms(self.first_at - came) if self.first_at is not None else None,
            token_us=round(decode_s / (tokens - 1) * 1e6) if tokens > 1 else None,
            completion_ms=_ms(now - came),
            batch=self.batch or self.start.batch,
        )

    def result(self, failure: FailedOutcome, chunks: int = 0, problem: tuple[str, str] | None = None) -> Result:
        code, message = problem or self.problem or MESSAGES[failure]
        return Result(
            failure=failure, text="".join(self.text), usage=self.usage, chunks=chunks, code=code, message=message
        )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


class Runs:
    """The runs of one worker, by the place of their requests."""

    def __init__(self) -> None:
        self._runs: dict[Coordinates, Run] = {}
        self._changed = asyncio.Condition()

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(run.entry.digest for run in self._runs.values())

    def add(self, run: Run) -> None:
        self._runs[run.entry.request] = run

    def remove(self, run: Run) -> bool:
        """False where another run of the same request took its place."""
        if self._runs.get(run.entry.request) is not run:
            return False
        del self._runs[run.entry.request]
        return True

    async def changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def of(self, which: Callable[[Entry], bool]) -> list[Run]:
        return [run for run in self if which(run.entry)]

    async def until_idle(self, seconds: float | None, digest: str | None = None) -> None:
        """Wait until nothing runs (under a digest), at most so long."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not self.of(lambda entry: digest in (None, entry.digest)))
        except TimeoutError:
            return
