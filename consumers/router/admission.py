"""One piece of work, one answer: decided by the registry, granted by the ledger, and never by neither."""

from collections.abc import Sequence
from typing import assert_never

from consumers.router.decide import Candidate, Context, decide
from consumers.router.effects import NOTHING, Effect, Effects
from consumers.router.intake import Cancellation, Job, Unreadable, Work
from consumers.router.prompts import Counter, NotCountable
from infra.clock import Clock
from infra.kafka.records import Outgoing
from infra.logs import ActionLog
from infra.metrics import Metrics
from ledger import answers
from ledger.registry import Present, Registry
from ledger.store import Ledger, LedgerUnavailable, LedgerUnreachable
from schemas.adapters import BaseManifest
from schemas.jobs import RETRYABLE, JobClass, RejectReason

log = ActionLog("router")

# A job that waits for less is not worth a record.
NOTICE_AFTER_MS = 1_000
LEDGER_CLOSED = "the ledger is closed until it is rebuilt from the log"
IN_DOUBT = "jobs cannot be decided now; this one waits here and is asked for again"
NO_WORKER = "no worker is ready for this adapter now; send the job again later"
# What is said where only the reason is remembered: the log keeps no wording.
WORDS = {
    RejectReason.CANCELLED: "the job was taken back before it arrived",
    RejectReason.JOB_ID_REUSED: "this job id was used for another job; take a new one",
    RejectReason.CAPACITY: "no place is free now; send the job again later",
    RejectReason.CONCURRENCY: "this tenant has as many unfinished jobs as it may have; send the job again later",
    RejectReason.RATE: "this tenant's tokens of a minute are used or reserved; send the job again later",
    RejectReason.BUDGET: "this tenant's tokens of today are used or reserved; send the job again tomorrow (UTC)",
    RejectReason.NOT_READY: "jobs are not admitted now; send the job again later",
    RejectReason.DEADLINE_PASSED: "the deadline passed before the job was admitted",
}
# What a client is told of what was full.
FULL = {
    answers.Resource.TENANT: (RejectReason.CONCURRENCY, WORDS[RejectReason.CONCURRENCY]),
    answers.Resource.ADAPTER: (
        RejectReason.CONCURRENCY,
        "this adapter has as many unfinished jobs as it may have; send the job again later",
    ),
    answers.Resource.RATE: (RejectReason.RATE, WORDS[RejectReason.RATE]),
    answers.Resource.BUDGET: (RejectReason.BUDGET, WORDS[RejectReason.BUDGET]),
    answers.Resource.WINDOW: (RejectReason.CAPACITY, WORDS[RejectReason.CAPACITY]),
    answers.Resource.SHARE: (
        RejectReason.CAPACITY,
        "this tenant has its share of the places now; send the job again later",
    ),
}


class Admissions:
    """Answers work. None means: not now, keep it and ask again.

    A batch job waits where an interactive one is refused. Whatever may have taken a lease already, or may have been
    routed by a former owner, waits too, and is told so: a job that is told to come again and holds a lease would find
    its id taken.
    """

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        present: Present,
        effects: Effects,
        counter: Counter,
        key_id: str,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        # Why nothing new may be admitted, whatever the ledger says; None while the registry view can be trusted.
        self.closed: str | None = "the registry view was not read yet"
        self.ledger_problem: str | None = "the ledger was not asked yet"
        self.ledger_closed_words = LEDGER_CLOSED
        self._ledger = ledger
        self._registry = registry
        self._present = present
        self._effects = effects
        self._counter = counter
        self._key_id = key_id
        self._clock = clock
        self._metrics = metrics

    def notices(self, works: Sequence[Work]) -> list[Outgoing]:
        """What to tell tenants of jobs that wait: once per job and reason, and not of a moment's waiting."""
        found = []
        held: dict[str, tuple[RejectReason, str]] = {}
        for work in works:
            if not isinstance(work, Job):
                continue
            if work.waits_for is None and work.job_class is JobClass.INTERACTIVE:
                # Not asked for while one of its alias before it is in doubt.
                work.waits_for = held.get(work.job.alias)
            if work.waits_for is None:
                continue
            held[work.job.alias] = work.waits_for
            waited_ms = self._clock.now_ms() - work.record.timestamp_ms
            if work.waits_for[0] is not work.noticed and waited_ms >= NOTICE_AFTER_MS:
                work.noticed = work.waits_for[0]
                found.append(self._effects.waiting(work, *work.waits_for))
        return found

    def ledger_said(self, problem: str | None) -> None:
        """What whoever keeps the ledger says of it: readiness and refusals say it on."""
        self.ledger_closed_words = problem or LEDGER_CLOSED
        if problem is not None:
            self.ledger_problem = problem

    async def count(self, works: Sequence[Work]) -> None:
        """Count the prompts of what was not counted by its base's tokenizer yet, for each base at once.

        What has no base, or one that cannot count now, stays without a count, and so without a place.
        """
        bases: dict[str, BaseManifest] = {}
        jobs: dict[str, list[Job]] = {}
        for work in works:
            known = self._registry.base_behind(work.tenant, work.job.alias) if isinstance(work, Job) else None
            if isinstance(work, Job) and known is not None and work.counted_by != known.manifest.tokenizer:
                bases[known.base] = known.manifest
                jobs.setdefault(known.base, []).append(work)
        for digest, base in bases.items():
            try:
                counts = await self._counter.count(base, [work.job for work in jobs[digest]])
            except NotCountable as error:
                log.warning("prompts.not_countable", base=digest, detail=str(error))
                continue
            for work, found in zip(jobs[digest], counts, strict=True):
                work.prompt_tokens, work.counted_by = found, base.tokenizer

    async def answer(self, work: Work) -> Effect | None:
        match work:
            case Unreadable():
                self._metrics.count("records_dead_lettered")
                return self._effects.unreadable(work)
            case Cancellation():
                return await self._cancel(work)
            case Job():
                return await self._admit(work)
        assert_never(work)

    async def _admit(self, work: Job) -> Effect | None:
        if self.closed is not None:
            return self._not_now(work, RejectReason.NOT_READY)
        try:
            word = await self._ask(work)
        except LedgerUnreachable as error:
            # Nobody listens: nothing was taken, and the next Redis knows only what the log says.
            self.ledger_problem = str(error)
            return self._not_now(work, RejectReason.NOT_READY)
        except LedgerUnavailable as error:
            self.ledger_problem = str(error)
            work.in_doubt = True
            return self._not_now(work, RejectReason.NOT_READY)
        self.ledger_problem = self.ledger_closed_words if isinstance(word, answers.Closed) else None
        return word if word is None or isinstance(word, Effect) else self._heard(work, word)

    async def _ask(self, work: Job) -> answers.AdmitAnswer | Effect | None:
        record = work.record
        context = Context(
            tenant=work.tenant,
            job_class=work.job_class,
            timestamp_ms=record.timestamp_ms,
            size_bytes=len(record.value or b""),
            prompt_tokens=work.prompt_tokens,
            counted_by=work.counted_by,
            key_id=self._key_id,
        )
        choice = decide(work.job, context, self._registry, self._clock.now_ms(), self._present)
        if isinstance(choice, Candidate):
            word = await self._ledger.admit(
                answers.Admission(
                    job_id=work.job_id,
                    body_hash=work.body_hash,
                    ingress=record.coordinates,
                    decision=choice.decision,
                    concurrency_max=choice.tenant.concurrency_max,
                    adapter_concurrency_max=choice.tenant.adapter_concurrency_max or choice.tenant.concurrency_max,
                    tokens_per_minute=choice.tenant.tokens_per_minute,
                    tokens_per_day=choice.tenant.tokens_per_day,
                    window_max=choice.window_max,
                    reserved=choice.reserved,
                )
            )
            # Full: the ledger holds no lease of it, whatever an earlier call did.
            work.in_doubt = work.in_doubt and not isinstance(word, answers.Full)
            if isinstance(word, answers.Full) and choice.window_max == 0:
                return self._not_now(work, RejectReason.NOT_READY, NO_WORKER, word.retry_after_ms)
            if not isinstance(word, answers.Expired):
                return word
            return await self._refuse(work, RejectReason.DEADLINE_PASSED, WORDS[RejectReason.DEADLINE_PASSED])
        if choice.reason in RETRYABLE:
            return self._not_now(work, choice.reason, choice.message)
        return await self._refuse(work, choice.reason, choice.message)

    async def _refuse(self, work: Job, reason: RejectReason, message: str) -> answers.RefuseAnswer:
        """The first word on a job id stands: a job that was admitted before its alias went away stays admitted."""
        return await self._ledger.refuse(
            answers.Refusal(
                tenant=work.tenant,
                job_id=work.job_id,
                body_hash=work.body_hash,
                ingress=work.record.coordinates,
                reason=reason,
                message=message,
            )
        )

    def _heard(self, work: Job, word: answers.AdmitAnswer) -> Effect | None:
        match word:
            case answers.Granted():
                return self._granted(work, word)
            case answers.Full():
                return self._not_now(work, *FULL[word.resource], word.retry_after_ms)
            case answers.Closed():
                return self._not_now(work, RejectReason.NOT_READY)
            case answers.Refused():
                return self._rejected(work, word.reason, word.message or WORDS.get(word.reason, "refused before"))
            case answers.BodyDiffers():
                return self._rejected(work, RejectReason.JOB_ID_REUSED)
            case answers.TakenBack():
                return self._rejected(work, RejectReason.CANCELLED)
            case answers.Expired():
                return self._rejected(work, RejectReason.DEADLINE_PASSED)
            case answers.Ended():
                self._count(work, "repeated")
                return NOTHING
        assert_never(word)

    def _granted(self, work: Job, granted: answers.Granted) -> Effect:
        """A redelivered record has its stored decision appended again; the same job posted anew was answered once."""
        if granted.ingress != work.record.coordinates:
            self._count(work, "repeated")
            return NOTHING
        self._count(work, "repeated" if granted.repeated else "admitted")
        waited_s = (self._clock.now_ms() - work.record.timestamp_ms) / 1000
        self._metrics.observe("decision_seconds", max(0.0, waited_s), job_class=work.job_class)
        return self._effects.admitted(work, granted)

    def _rejected(self, work: Job, reason: RejectReason, message: str | None = None) -> Effect:
        self._count(work, "cancelled" if reason is RejectReason.CANCELLED else "rejected")
        self._metrics.count("jobs_rejected", reason=reason)
        return self._effects.rejected(work, reason, message or WORDS[reason])

    def _not_now(
        self, work: Job, reason: RejectReason, message: str | None = None, retry_after_ms: int = answers.RETRY_AFTER_MS
    ) -> Effect | None:
        work.waits_for = (reason, IN_DOUBT if work.in_doubt else message or WORDS[reason])
        if work.job_class is JobClass.BATCH or work.in_doubt:
            return None
        self._count(work, "full")
        self._metrics.count("jobs_rejected", reason=reason)
        return self._effects.rejected(work, reason, message or WORDS[reason], retry_after_ms)

    async def _cancel(self, work: Cancellation) -> Effect | None:
        try:
            word = await self._ledger.cancel(work.tenant, work.job_id)
        except LedgerUnavailable as error:
            self.ledger_problem = str(error)
            return None
        match word:
            case answers.Closed():
                return None
            case answers.Ended():
                return NOTHING
            case answers.CancelRemembered():
                return self._effects.cancelled(work, None)
            case answers.Flagged():
                return self._effects.cancelled(work, word)
        assert_never(word)

    def _count(self, work: Job, answer: str) -> None:
        self._metrics.count("jobs_decided", job_class=work.job_class, answer=answer)
