"""What a finished job leaves behind: its final reply and its metering record. Pure."""

import hashlib
import hmac
from dataclasses import dataclass, field

from consumers.worker.plan import Entry
from schemas.digest import digest_of
from schemas.jobs import Outcome
from schemas.metering import UsageRecorded
from schemas.record import Identity
from schemas.replies import FailedOutcome, FinishReason, JobCompleted, JobFailed, Receipt, Usage
from schemas.service import Service


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Which execution of a job this was, and where."""

    attempt: int
    fence: str
    engine: str
    worker: str
    started_at_ms: int | None
    service: Service | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """How an execution ended: with a finish reason, or with a failure and its code and message."""

    failure: FailedOutcome | None = None
    text: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage = field(default_factory=Usage)
    chunks: int = 0
    code: str = ""
    message: str = ""

    @property
    def outcome(self) -> Outcome:
        return self.failure or Outcome.COMPLETED


def final_reply(entry: Entry, execution: Execution, result: Result) -> JobCompleted | JobFailed:
    """The one final reply of a job, with its receipt."""
    route = entry.route
    receipt = Receipt(
        identity=route.identity, attempt=execution.attempt, fence=execution.fence, engine=execution.engine
    )
    if result.failure is None:
        return JobCompleted(
            job_id=route.job_id,
            ingress=route.ingress,
            receipt=receipt,
            text=result.text,
            finish_reason=result.finish_reason,
            usage=result.usage,
            chunks=result.chunks,
            text_hash=digest_of(result.text.encode()),
        )
    return JobFailed(
        job_id=route.job_id,
        ingress=route.ingress,
        receipt=receipt,
        outcome=result.failure,
        code=result.code,
        message=result.message,
        text=result.text,
        usage=result.usage,
        chunks=result.chunks,
    )


def usage_record(
    entry: Entry, execution: Execution, result: Result, reply: JobCompleted | JobFailed, now_ms: int
) -> UsageRecorded:
    """What the job used, bound to the reply that says so."""
    route = entry.route
    return UsageRecorded(
        identity=route.identity,
        job_id=route.job_id,
        job_class=route.job_class,
        attempt=execution.attempt,
        outcome=result.outcome,
        usage=result.usage,
        ingress=route.ingress,
        request=entry.request,
        ledger_epoch=route.ledger_epoch,
        engine=execution.engine,
        worker=execution.worker,
        started_at_ms=execution.started_at_ms,
        ended_at_ms=now_ms,
        reply_hash=digest_of(reply.encode()),
        service=execution.service,
    )


def cache_salt(secret: bytes, identity: Identity, epoch: int) -> str:
    """Separates prefix caches by tenant, adapter, base and tokenizer with template, and by epoch after a revocation.

    Length-prefixed parts under a key that never leaves the process: no caller can make two identities meet.
    """
    parts = ("switchyard/kv/1", identity.tenant, identity.adapter, identity.base, identity.tokenizer, str(epoch))
    message = b"".join(len(part).to_bytes(4, "big") + part.encode() for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
