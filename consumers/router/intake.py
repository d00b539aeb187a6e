"""From a record of a tenant's topic to work: decoded once, under the tenant and class of its topic."""

import re
from dataclasses import dataclass

from infra.kafka.records import Incoming
from schemas.digest import digest_of
from schemas.errors import InvalidRecord
from schemas.ids import JOB_ID_PATTERN, Digest, JobId, TenantId
from schemas.jobs import JobCancelled, JobClass, JobSubmitted, RejectReason
from schemas.record import strict_json
from schemas.topics import class_of


@dataclass(kw_only=True)
class Job:
    """A job that could be read."""

    record: Incoming
    tenant: TenantId
    job_class: JobClass
    job: JobSubmitted
    # The canonical job, and its digest: two spellings of the same JSON are the same job.
    body: bytes
    body_hash: str
    # Whether an earlier look at this record may have taken a lease: it is then not refused before the ledger says so.
    in_doubt: bool
    # Of its prompt; None until it was counted, a text where there is a reason why it cannot be.
    prompt_tokens: int | str | None = None
    counted_by: Digest | None = None
    # What it was last told to wait for, and what its tenant was told that it waits for.
    waits_for: tuple[RejectReason, str] | None = None
    noticed: RejectReason | None = None

    @property
    def job_id(self) -> JobId:
        return self.job.job_id


@dataclass(frozen=True, kw_only=True)
class Cancellation:
    """A tenant takes a job back."""

    record: Incoming
    tenant: TenantId
    job_id: JobId


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """Not a record of its topic. On a job topic the tenant is told what to mend."""

    record: Incoming
    tenant: TenantId
    reason: RejectReason
    detail: str
    job_id: JobId | None
    answered: bool


Work = Job | Cancellation | Unreadable


def read(record: Incoming, in_doubt: bool) -> Work:
    """What a record asks for. Headers and key are the sender's words and are not read."""
    tenant, job_class = class_of(record.topic)
    try:
        if job_class is None:
            return _cancellation(record, tenant)
        job = JobSubmitted.decode(record.value)
    except InvalidRecord as error:
        return Unreadable(
            record=record,
            tenant=tenant,
            reason=RejectReason.INVALID_RECORD,
            detail=str(error),
            job_id=_job_id_in(record.value),
            answered=job_class is not None,
        )
    body = job.encode()
    return Job(
        record=record,
        tenant=tenant,
        job_class=job_class,
        job=job,
        body=body,
        body_hash=digest_of(body),
        in_doubt=in_doubt,
    )


def _cancellation(record: Incoming, tenant: TenantId) -> Cancellation | Unreadable:
    cancelled = JobCancelled.decode(record.value)
    if cancelled.tenant is None or cancelled.tenant == tenant:
        return Cancellation(record=record, tenant=tenant, job_id=cancelled.job_id)
    return Unreadable(
        record=record,
        tenant=tenant,
        reason=RejectReason.TENANT_MISMATCH,
        detail="'tenant' is not the one whose topic this is",
        job_id=cancelled.job_id,
        answered=False,
    )


def _job_id_in(value: bytes | None) -> JobId | None:
    """The job id of a broken record, where one can still be read: the refusal then names it."""
    try:
        document = strict_json(value or b"")
    except InvalidRecord:
        return None
    found = document.get("job_id") if isinstance(document, dict) else None
    return found if isinstance(found, str) and re.fullmatch(JOB_ID_PATTERN, found) else None
