"""The audit: what happened under a digest. No prompt, no output, no personal data.

Writers number their records per (process life, partition) from 0, so that one lost before the broker shows.
"""

from enum import StrEnum
from typing import Literal, Self

from schemas.ids import Alias, Count, Digest, JobId, PoolId, TenantId
from schemas.impersonation import Impersonation
from schemas.jobs import JobClass, Outcome, RejectReason
from schemas.record import Coordinates, Identity, Record
from schemas.replies import Usage
from schemas.service import Service


class LoadReason(StrEnum):
    """Why an adapter was put into a slot."""

    #: A job waited for it.
    JOB = "job"
    #: A record that is not due yet names it.
    PREFETCH = "prefetch"
    GATE = "gate"
    #: The one token that a worker makes before it is offered to anybody.
    SMOKE = "smoke"


class LoadSource(StrEnum):
    """Where an adapter came from."""

    STORE = "store"
    HOST = "host"


class Place(StrEnum):
    """Where a worker holds an adapter."""

    SLOT = "slot"
    HOST = "host"


class EvictReason(StrEnum):
    """Why an adapter left its slot or the host cache."""

    #: Another adapter of the same owner took its place.
    OWN_SHARE = "own_share"
    #: Its owner held more than its share, and another tenant was below its own.
    RECLAIM_BORROWED = "reclaim_borrowed"
    #: Nobody exceeds a share by a whole adapter: tenants take turns by quantum.
    TURN = "turn"
    #: It was not asked for; inside its owner only.
    IDLE = "idle"
    #: The process came near the limit of its memory.
    MEMORY = "memory"
    REVOKED = "revoked"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


class AuditRecord(Record):
    """A numbered record of one writer life. The audit writer fills in the two numbers."""

    writer: str = ""
    writer_seq: Count = 0

    def numbered(self, writer: str, writer_seq: int) -> Self:
        return self.model_copy(update={"writer": writer, "writer_seq": writer_seq})


def undigested(tenant: TenantId) -> str:
    """The audit key of what has no digest."""
    return f"tenant/{tenant}"


class Admitted(AuditRecord):
    """The whole decision on a job, with the ledger's time and epoch: what a fold needs, and no clock."""

    type: Literal["Admitted"] = "Admitted"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    job_class: JobClass
    alias: Alias
    body_hash: Digest
    ingress: Coordinates
    pool: PoolId
    request_partition: Count
    tokens_max: Count
    context_max: Count
    decided_on: dict[str, Count]
    ledger_epoch: Count
    admitted_at_us: Count
    lease_ends_at_us: Count
    expires_at_ms: Count
    prompt_tokens: Count = 0
    # The tenant's weight, and what its fairness counter was lifted by.
    weight: Count = 100
    lift: Count = 0
    key_id: str
    # Who acted in the tenant's name, why and until when; None for the tenant itself.
    impersonation: Impersonation | None = None


class Rejected(AuditRecord):
    """A permanent refusal. Keyed `tenant/<tenant>`: it has no digest."""

    type: Literal["Rejected"] = "Rejected"
    version: Literal[1] = 1
    tenant: TenantId
    job_id: JobId | None
    body_hash: Digest | None
    ingress: Coordinates
    reason: RejectReason


class CancelRequested(AuditRecord):
    """A tenant took a job back. `identity` is None where the job had not arrived yet."""

    type: Literal["CancelRequested"] = "CancelRequested"
    version: Literal[1] = 1
    tenant: TenantId
    job_id: JobId
    identity: Identity | None
    ingress: Coordinates


class Started(AuditRecord):
    """One execution of a job began; written before its first chunk."""

    type: Literal["Started"] = "Started"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    attempt: Count
    fence: str
    request: Coordinates
    worker: str
    engine: str


class Finished(AuditRecord):
    """The outcome of a job, taken from a committed UsageRecorded, never from a process that may have died."""

    type: Literal["Finished"] = "Finished"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    attempt: Count
    outcome: Outcome
    usage: Usage
    metering: Coordinates
    reply_hash: Digest
    # None where the job never reached a queue, or was written before this was recorded.
    service: Service | None = None


class AdapterLoaded(AuditRecord):
    """A worker put an adapter into a slot, or a copy of it, re-hashed, into host memory."""

    type: Literal["AdapterLoaded"] = "AdapterLoaded"
    version: Literal[1] = 1
    adapter: Digest
    base: Digest
    worker: str
    engine: str
    reason: LoadReason
    duration_ms: Count
    resident_bytes: Count
    owner: TenantId | None = None
    source: LoadSource = LoadSource.STORE
    place: Place = Place.SLOT


class AdapterLoadFailed(AuditRecord):
    """A load failed; the digest is quarantined on that worker."""

    type: Literal["AdapterLoadFailed"] = "AdapterLoadFailed"
    version: Literal[1] = 1
    adapter: Digest
    base: Digest
    worker: str
    engine: str
    code: str


class AdapterEvicted(AuditRecord):
    """An adapter left its slot, or its copy the host memory, and the engine was seen not to list it there any more."""

    type: Literal["AdapterEvicted"] = "AdapterEvicted"
    version: Literal[1] = 1
    adapter: Digest
    base: Digest
    worker: str
    engine: str
    reason: EvictReason
    resident_bytes: Count
    owner: TenantId | None = None
    duration_ms: Count = 0
    place: Place = Place.SLOT
    # Whether a copy stays in host memory.
    kept_in_host: bool = False


class ImpersonationGranted(AuditRecord):
    """Somebody may act in a tenant's name. Keyed `tenant/<tenant>`; written before the grant is handed out.

    All of the grant but its signature, so that nobody who reads the audit can use it. `Impersonated` repeats it, under
    the same `grant_id`, for each job.
    """

    type: Literal["ImpersonationGranted"] = "ImpersonationGranted"
    version: Literal[1] = 1
    impersonation: Impersonation


class Impersonated(AuditRecord):
    """A job is admitted that somebody else submitted in the tenant's name. Written before its `Admitted`."""

    type: Literal["Impersonated"] = "Impersonated"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    ingress: Coordinates
    impersonation: Impersonation


class WriterClosed(AuditRecord):
    """An orderly end of one writer life on one partition: nothing of it follows."""

    type: Literal["WriterClosed"] = "WriterClosed"
    version: Literal[1] = 1


AUDIT_RECORDS: tuple[type[AuditRecord], ...] = (
    Admitted, Rejected, CancelRequested, Started, Finished,
    AdapterLoaded, AdapterLoadFailed, AdapterEvicted, ImpersonationGranted, Impersonated, WriterClosed,
)  # fmt: skip
