"""One execution of one job: begin in the ledger, run on the engine, and the records that end it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from consumers.engines.protocol import (
    AdapterMissing,
    Delta,
    EngineFault,
    EngineRequest,
    FaultReason,
    PromptInvalid,
    RequestInvalid,
)
from consumers.worker.adapters import Adapters
from consumers.worker.doors import Doors
from consumers.worker.replies import Execution, Result, cache_salt, final_reply, usage_record
from consumers.worker.run import Run
from consumers.worker.stream import Chunks, Streams
from consumers.worker.verify import standing
from infra.kafka.lane import LaneLost
from infra.kafka.records import Outgoing
from infra.logs import ActionLog
from ledger.answers import Begun, BegunCancelled, Closed, Elsewhere, Ended, Fenced, Unknown
from ledger.store import LedgerUnavailable
from schemas.audit import Started
from schemas.jobs import OnInterrupt, Outcome
from schemas.replies import FailedOutcome, FinishReason, Usage
from schemas.topics import METERING, REPLIES

log = ActionLog("worker")

# A job that ran when its worker crashed twice runs alone; after the third crash it is a dead letter.
CRASHES_ALONE = 2
CRASHES_MAX = 3
LEDGER_RETRY_S = 0.2


class HandedOver(Exception):
    """The execution was given up in order, to begin again elsewhere, later or alone."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A copy, or a job that is over: nothing is said, its offset is done."""


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The job ends with these records. `poison` also makes its request a dead letter."""

    outcome: Outcome
    records: tuple[Outgoing, ...]
    poison: bool = False


class Executor:
    """Runs entries. Makes no choice about order or residency."""

    def __init__(self, doors: Doors, adapters: Adapters, streams: Streams) -> None:
        self._doors = doors
        self._adapters = adapters
        self._streams = streams

    async def run(self, run: Run) -> Passed | Closing:
        """Execute. Raises HandedOver, LaneLost, EngineDead.

        A run that was stopped before it began still begins in the ledger: only the first offset of a job answers.
        """
        begun = await self._begin(run)
        if isinstance(begun, Passed):
            return begun
        run.attempt = begun.attempt
        self._doors.failpoints.reach("begun")
        if isinstance(begun, BegunCancelled):
            run.reason = run.reason or Outcome.CANCELLED
            return self._close(run, begun.attempt, None, run.result(run.reason))
        early = self._early(run, begun)
        if early is not None:
            return self._close(run, begun.attempt, None, early, poison=begun.crashes >= CRASHES_MAX)
        if run.hand_over or (begun.crashes >= CRASHES_ALONE and not run.entry.alone):
            await self.hand_over(run, begun.attempt)
            raise HandedOver
        return await self._execute(run, begun)

    async def hand_over(self, run: Run, attempt: int) -> None:
        """Tell the ledger that this end is no crash. Where it cannot be told, the next begin counts one."""
        route = run.entry.route
        try:
            await self._doors.ledger.hand_over(route.identity.tenant, route.job_id, run.entry.request, attempt)
        except LedgerUnavailable:
            log.warning("job.hand_over_unnoted", job_id=route.job_id)

    def stop(self, run: Run, reason: FailedOutcome, problem: tuple[str, str] | None = None) -> None:
        """End a run early with an outcome. The first reason stands."""
        if not run.stopped:
            run.reason, run.problem = reason, problem
            self._doors.engine.abort(run.request_id)

    def give_up(self, runs: Sequence[Run]) -> None:
        """End runs without an outcome: they begin again."""
        for run in runs:
            if not run.stopped:
                run.hand_over = True
                self._doors.engine.abort(run.request_id)

    async def abandon(self, runs: Sequence[Run]) -> None:
        """The engine died, which is no job's fault: nobody's crash is counted for it."""
        for run in runs:
            if run.attempt and not run.hand_over:
                run.hand_over = True
                await self.hand_over(run, run.attempt)

    async def _begin(self, run: Run) -> Begun | BegunCancelled | Passed:
        route = run.entry.route
        tenant = route.identity.tenant
        while not run.lane.lost:
            try:
                answer = await self._doors.ledger.begin(tenant, route.job_id, run.entry.request, run.lane.fence)
                if isinstance(answer, Unknown):
                    # The route is authentic, so the job was admitted: the ledger lost it. Fold it again.
                    await self._doors.ledger.adopt(route)
            except LedgerUnavailable:
                answer = Closed()
            match answer:
                case Begun() | BegunCancelled():
                    return answer
                case Elsewhere() | Ended():
                    self._doors.metrics.count("routes_refused", reason="copy")
                    return Passed()
                case Fenced():
                    raise LaneLost
            # Closed or unknown: without the ledger nothing starts, and nothing is lost either.
            await asyncio.sleep(LEDGER_RETRY_S)
            if run.hand_over:
                raise HandedOver
        raise LaneLost

    def _early(self, run: Run, begun: Begun) -> Result | None:
        """Why a begun job ends before it reaches the engine, or None."""
        if run.reason is not None:
            return run.result(run.reason)
        bad = standing(run.entry.route, self._doors.registry, self._doors.base, self._doors.clock.now_ms())
        if bad is not None:
            return run.result(bad.outcome, problem=(bad.value, f"not executed: {bad.value.replace('_', ' ')}"))
        if begun.remaining_ms <= 0:
            return run.result(Outcome.EXPIRED)
        if begun.crashes and run.entry.job.on_interrupt is OnInterrupt.FAIL:
            return run.result(Outcome.INTERRUPTED)
        if begun.crashes >= CRASHES_MAX:
            return run.result(Outcome.FAILED, problem=("poison", "the worker crashed each time it ran this job"))
        return None

    async def _execute(self, run: Run, begun: Begun) -> Closing:
        entry, job = run.entry, run.entry.job
        started_at_ms = self._doors.clock.now_ms()
        ends = asyncio.get_running_loop().call_later(begun.remaining_ms / 1000, lambda: self.stop(run, Outcome.EXPIRED))
        try:
            # Off the loop: a prompt of a megabyte takes a tokenizer a while.
            prompt_ids = await asyncio.to_thread(self._doors.engine.encode, job.messages or job.prompt or "")
            counted = entry.route.limits.prompt_tokens
            if counted and len(prompt_ids) > counted:
                # It was not reserved: the tenant's quota would be exceeded.
                problem = ("prompt_tokens_exceeded", "the prompt has more tokens than were counted and reserved")
                return self._close(run, begun.attempt, started_at_ms, run.result(Outcome.FAILED, problem=problem))
            run.usage = Usage(prompt_tokens=len(prompt_ids))
            await self._doors.audit.append(entry.digest, self._started(run, begun.attempt))
            self._doors.failpoints.reach("started")
            result = await self._stream(run, begun.attempt, prompt_ids)
        except PromptInvalid as error:
            result = run.result(Outcome.FAILED, problem=("prompt_invalid", str(error)))
        finally:
            ends.cancel()
        if run.hand_over:
            await self.hand_over(run, begun.attempt)
            raise HandedOver
        return self._close(run, begun.attempt, started_at_ms, result)

    async def _stream(self, run: Run, attempt: int, prompt_ids: tuple[int, ...]) -> Result:
        chunks = Chunks(self._streams, run.entry, attempt, run.carried)
        finish: FinishReason | None = None
        problem: tuple[str, str] | None = None
        if run.stopped:
            return run.result(run.reason or Outcome.FAILED)
        try:
            async with aclosing(self._doors.engine.generate(self._request(run, attempt, prompt_ids))) as deltas:
                async for delta in deltas:
                    self._take(run, delta, len(prompt_ids))
                    await chunks.add(delta)
                    self._doors.failpoints.reach("streamed")
                    finish = delta.finish_reason
        except EngineFault as error:
            problem = (f"engine_{error.reason.value}", "the engine failed while it ran this job")
            if error.reason is FaultReason.CORRUPTED:
                # Nothing it produced can be trusted, and nothing more is asked of this adapter.
                run.text.clear()
                self._adapters.quarantine(run.entry.digest)
        except RequestInvalid as error:
            problem = ("request_invalid", str(error))
        except AdapterMissing:
            # Never the base instead: that would be another identity than the one that was signed.
            problem = ("adapter_missing", "the job's adapter was not in the engine")
        sent = await chunks.close()
        if run.reason is not None and finish is None:
            return run.result(run.reason, sent)
        if problem is not None or finish is None:
            return run.result(Outcome.FAILED, sent, problem)
        return Result(text="".join(run.text), finish_reason=finish, usage=run.usage, chunks=sent)

    def _take(self, run: Run, delta: Delta, prompt_tokens: int) -> None:
        run.last_at = self._doors.clock.monotonic()
        if run.first_at is None:
            run.first_at, run.batch = run.last_at, delta.batch
            self._doors.metrics.observe(
                "first_token_seconds", run.last_at - run.entry.queued_at, job_class=run.entry.route.job_class
            )
        run.text.append(delta.text)
        run.usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=run.usage.completion_tokens + len(delta.token_ids),
            cached_tokens=delta.cached_tokens,
        )

    def _request(self, run: Run, attempt: int, prompt_ids: tuple[int, ...]) -> EngineRequest:
        route, parameters = run.entry.route, run.entry.job.parameters
        run.request_id = f"{run.entry.name}/{attempt}"
        return EngineRequest(
            request_id=run.request_id,
            digest=run.entry.digest,
            prompt_ids=prompt_ids,
            max_tokens=min(parameters.max_tokens, route.limits.tokens_max),
            cache_salt=cache_salt(self._doors.salt_key, route.identity, self._adapters.salt_epoch),
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            seed=parameters.seed,
            stop=parameters.stop,
        )

    def _started(self, run: Run, attempt: int) -> Started:
        return Started(
            identity=run.entry.route.identity,
            job_id=run.entry.route.job_id,
            attempt=attempt,
            fence=run.lane.fence,
            request=run.entry.request,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
        )

    def _close(
        self, run: Run, attempt: int, started_at_ms: int | None, result: Result, poison: bool = False
    ) -> Closing:
        execution = Execution(
            attempt=attempt,
            fence=run.lane.fence,
            engine=self._doors.engine.build.id,
            worker=self._doors.worker,
            started_at_ms=started_at_ms,
            service=run.service(self._doors.clock.monotonic()),
        )
        entry = run.entry
        reply = final_reply(entry, execution, result)
        usage = usage_record(entry, execution, result, reply, self._doors.clock.now_ms())
        outgoing = self._doors.publisher.outgoing
        records: Sequence[Outgoing] = (
            outgoing(REPLIES.of(entry.route.identity.tenant), reply.job_id, reply, entry.digest, extra=run.carried),
            outgoing(METERING.name, entry.digest, usage, entry.digest, extra=run.carried),
        )
        self._doors.metrics.count("jobs_finished", outcome=result.outcome.value)
        return Closing(outcome=result.outcome, records=tuple(records), poison=poison)
