"""What the log must say about a piece of work: the records of an answer, made but not yet appended."""

from dataclasses import dataclass

from consumers.router.intake import Cancellation, Job, Unreadable
from infra.kafka.publisher import Publisher
from infra.kafka.records import Outgoing, dead_letter
from ledger.answers import Decision, Flagged, Granted
from schemas.audit import Admitted, AuditRecord, CancelRequested, Impersonated, Rejected, undigested
from schemas.impersonation import Impersonation
from schemas.jobs import RETRYABLE, RejectReason, RequestCancelled, RequestRouted, Route
from schemas.record import Coordinates
from schemas.replies import JobRejected, JobWaiting
from schemas.signing import SigningKey
from schemas.topics import CANCELS, REPLIES, REQUESTS, STREAM

COMPONENT = "router"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """In the order in which they are appended: audit, then requests or cancels, then what commits with the offset."""

    audit: tuple[tuple[str, AuditRecord], ...] = ()
    appends: tuple[Outgoing, ...] = ()
    replies: tuple[Outgoing, ...] = ()


NOTHING = Effect()


class Effects:
    """Makes records: signs routes, and stamps what this process writes."""

    def __init__(self, publisher: Publisher, key: SigningKey) -> None:
        self._publisher = publisher
        self._key = key

    def admitted(self, work: Job, granted: Granted) -> Effect:
        """The same bytes whenever it is called for one decision: a signature by Ed25519 holds no dice."""
        decision, ingress = granted.decision, granted.ingress
        digest = decision.identity.adapter
        route = self._route(work, granted).signed_bytes()
        value = RequestRouted.assembled(route, self._key.sign_bytes(route), work.body)
        outgoing = self._publisher.encoded(
            REQUESTS.of(decision.pool), digest, RequestRouted, value, digest, decision.partition, work.record.opened()
        )
        audit: tuple[AuditRecord, ...] = (_admitted(work, granted, decision, ingress),)
        if work.job.impersonation is not None:
            audit = (_impersonated(work, work.job.impersonation.impersonation, granted), *audit)
        return Effect(audit=tuple((digest, record) for record in audit), appends=(outgoing,))

    def rejected(self, work: Job, reason: RejectReason, message: str, retry_after_ms: int | None = None) -> Effect:
        """A refusal. Only a permanent one is an outcome and belongs into the audit."""
        reply = JobRejected(
            tenant=work.tenant,
            job_id=work.job_id,
            ingress=work.record.coordinates,
            reason=reason,
            message=message,
            retryable=reason in RETRYABLE,
            retry_after_ms=retry_after_ms,
        )
        audit = () if reply.retryable else (_rejected(reply, work.body_hash),)
        return Effect(audit=audit, replies=(self._reply(work, reply),))

    def waiting(self, work: Job, reason: RejectReason, message: str) -> Outgoing:
        """A notice to the tenant that a job waits, and for what."""
        record = JobWaiting(job_id=work.job_id, ingress=work.record.coordinates, reason=reason, message=message)
        return self._publisher.outgoing(STREAM.of(work.tenant), work.job_id, record, extra=work.record.opened())

    def unreadable(self, work: Unreadable) -> Effect:
        """The bytes to the dead letters; to the tenant what to mend, unless it was a cancellation."""
        letter = dead_letter(work.record, COMPONENT, work.reason, work.detail)
        if not work.answered:
            return Effect(replies=(letter,))
        reply = JobRejected(
            tenant=work.tenant,
            job_id=work.job_id,
            ingress=work.record.coordinates,
            reason=work.reason,
            message=work.detail,
            retryable=False,
        )
        return Effect(audit=(_rejected(reply, None),), replies=(letter, self._reply(work, reply)))

    def cancelled(self, work: Cancellation, flagged: Flagged | None) -> Effect:
        """`flagged` is the admitted job; without one the job has not arrived, and no worker needs to know."""
        identity = flagged.decision.identity if flagged else None
        requested = CancelRequested(
            tenant=work.tenant, job_id=work.job_id, identity=identity, ingress=work.record.coordinates
        )
        if flagged is None or identity is None:
            return Effect(audit=((undigested(work.tenant), requested),))
        record = RequestCancelled(identity=identity, job_id=work.job_id, ingress=flagged.ingress)
        topic = CANCELS.of(flagged.decision.pool)
        outgoing = self._publisher.outgoing(topic, work.job_id, record, identity.adapter)
        return Effect(audit=((identity.adapter, requested),), appends=(outgoing,))

    def _route(self, work: Job, granted: Granted) -> Route:
        decision = granted.decision
        return Route(
            identity=decision.identity,
            job_id=work.job_id,
            job_class=decision.job_class,
            alias=decision.alias,
            body_hash=work.body_hash,
            ingress=granted.ingress,
            pool=decision.pool,
            partition=decision.partition,
            limits=decision.limits,
            decided_on=decision.decided_on,
            ledger_epoch=granted.epoch,
            admitted_at_us=granted.admitted_at_us,
            expires_at_ms=decision.expires_at_ms,
            weight=decision.weight,
            lift=granted.lift,
            # Another one than the decision's only where keys were changed between a crash and its recovery.
            key_id=self._key.key_id,
        )

    def _reply(self, work: Job | Unreadable, reply: JobRejected) -> Outgoing:
        key = work.job_id or str(reply.ingress)
        return self._publisher.outgoing(REPLIES.of(work.tenant), key, reply, extra=work.record.opened())


def _admitted(work: Job, granted: Granted, decision: Decision, ingress: Coordinates) -> Admitted:
    return Admitted(
        identity=decision.identity,
        job_id=work.job_id,
        job_class=decision.job_class,
        alias=decision.alias,
        body_hash=work.body_hash,
        ingress=ingress,
        pool=decision.pool,
        request_partition=decision.partition,
        tokens_max=decision.limits.tokens_max,
        context_max=decision.limits.context_max,
        decided_on=decision.decided_on,
        ledger_epoch=granted.epoch,
        admitted_at_us=granted.admitted_at_us,
        lease_ends_at_us=granted.lease_ends_at_us,
        expires_at_ms=decision.expires_at_ms,
        prompt_tokens=decision.limits.prompt_tokens,
        weight=decision.weight,
        lift=granted.lift,
        key_id=decision.key_id,
        impersonation=work.job.impersonation.impersonation if work.job.impersonation is not None else None,
    )


def _impersonated(work: Job, impersonation: Impersonation, granted: Granted) -> Impersonated:
    return Impersonated(
        identity=granted.decision.identity,
        job_id=work.job_id,
        ingress=granted.ingress,
        impersonation=impersonation,
    )


def _rejected(reply: JobRejected, body_hash: str | None) -> tuple[str, Rejected]:
    record = Rejected(
        tenant=reply.tenant, job_id=reply.job_id, body_hash=body_hash, ingress=reply.ingress, reason=reply.reason
    )  # fmt: skip
    return undigested(reply.tenant), record
