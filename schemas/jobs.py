"""Jobs: what a tenant asks for, and the signed route under which it is executed."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.digest import canonical, digest_of
from schemas.ids import Count, Digest, JobId, KeyId, PoolId, TenantId
from schemas.impersonation import SignedImpersonation
from schemas.record import Coordinates, Identity, Record, Value

MESSAGES_MAX = 256
STOPS_MAX = 4
TOKENS_MAX_LIMIT = 1 << 20
# Ingress, cancel and requests topics retain at least twice this (design section 3).
DEADLINE_MS_MAX = 24 * 3600 * 1000


class JobClass(StrEnum):
    """Given by the topic a job arrives on."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Outcome(StrEnum):
    """The single terminal state of a job."""

    COMPLETED = "completed"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    INTERRUPTED = "interrupted"
    REVOKED = "revoked"


class RejectReason(StrEnum):
    """Why a job was not admitted."""

    INVALID_RECORD = "invalid_record"
    UNKNOWN_ALIAS = "unknown_alias"
    LIMIT_EXCEEDED = "limit_exceeded"
    DEADLINE_PASSED = "deadline_passed"
    JOB_ID_REUSED = "job_id_reused"
    CANCELLED = "cancelled"
    TENANT_MISMATCH = "tenant_mismatch"
    CLASS_NOT_GRANTED = "class_not_granted"
    #: The grant that the job carries does not allow acting in this tenant's name.
    IMPERSONATION = "impersonation"
    # The retryable ones: no outcome, the job id stays free.
    #: The pool has no place for this tenant now.
    CAPACITY = "capacity"
    #: The tenant, or one of its adapters, has as many unfinished jobs as it may have.
    CONCURRENCY = "concurrency"
    #: The tenant's tokens of this minute are spent or reserved.
    RATE = "rate"
    #: The tenant's tokens of this day are spent or reserved.
    BUDGET = "budget"
    #: No worker is ready for this base, rank and build, or admission is closed.
    NOT_READY = "not_ready"


RETRYABLE = frozenset({
    RejectReason.CAPACITY, RejectReason.CONCURRENCY, RejectReason.RATE, RejectReason.BUDGET, RejectReason.NOT_READY,
})  # fmt: skip


class OnInterrupt(StrEnum):
    """What becomes of a job whose worker died while it ran."""

    RERUN = "rerun"
    FAIL = "fail"


class Message(Value):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Parameters(Value):
    """How to sample. Names, units and defaults are those of the OpenAI API."""

    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX_LIMIT)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=STOPS_MAX)] = ()


class JobSubmitted(Record):
    """A tenant asks for a job. Every field but `job_id`, `alias` and the text may be left out.

    `alias` is only bounded here: its grammar is checked where it is resolved, so that a malformed one is answered
    in the words of an unknown one. `deadline_ms` counts from the broker's timestamp.
    """

    type: Literal["JobSubmitted"] = "JobSubmitted"
    version: Literal[1] = 1
    job_id: JobId
    alias: str
    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=MESSAGES_MAX)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    parameters: Parameters = Parameters()
    session_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] | None = None
    on_interrupt: OnInterrupt = OnInterrupt.RERUN
    tenant: str | None = None
    # Set where an operator acts in the tenant's name.
    impersonation: SignedImpersonation | None = None

    def encode(self) -> bytes:
        """As every record, but a job of the tenant's own keeps the bytes, and so the hash, of its first release."""
        missing = {"impersonation"} if self.impersonation is None else None
        return canonical(self.model_dump(mode="json", exclude=missing))

    @model_validator(mode="after")
    def _one_text(self) -> "JobSubmitted":
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either 'messages' or 'prompt'")
        return self

    @property
    def body_hash(self) -> str:
        """Digest of the canonical job: two spellings of the same JSON are the same job."""
        return digest_of(self.encode())


class JobCancelled(Record):
    """A tenant takes a job back. Wins over a job of that id that arrives later."""

    type: Literal["JobCancelled"] = "JobCancelled"
    version: Literal[1] = 1
    job_id: JobId
    tenant: str | None = None


class Limits(Value):
    """What a job may use."""

    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX_LIMIT)]
    context_max: Annotated[int, Field(ge=1)]
    # As the router counted and reserved them; a worker fails a job whose prompt has more. 0: not counted.
    prompt_tokens: Count = 0


class Route(Value):
    """The signed statement: this job of this tenant runs under this digest on this base, within these limits."""

    identity: Identity
    job_id: JobId
    job_class: JobClass
    alias: str
    body_hash: Digest
    ingress: Coordinates
    pool: PoolId
    partition: Count
    limits: Limits
    # Where the router's registry view stood: next offset by topic. The worker's view must have passed it.
    decided_on: dict[str, Count]
    ledger_epoch: Count
    admitted_at_us: Count
    expires_at_ms: Count
    # The tenant's weight, and what its fairness counter was lifted by when this job was admitted.
    weight: Annotated[int, Field(ge=1, le=1000)] = 100
    lift: Count = 0
    key_id: KeyId

    def signed_bytes(self) -> bytes:
        """Without fields at their defaults: a route that was signed before a field existed keeps its signature."""
        return canonical(self.model_dump(mode="json", exclude_defaults=True))


class RequestRouted(Record):
    """An admitted job on its way to a worker. `signature` is a detached JWS (RFC 7515 appendix F) over `route`."""

    type: Literal["RequestRouted"] = "RequestRouted"
    version: Literal[1] = 1
    route: Route
    signature: Annotated[str, Field(max_length=1024)]
    job: JobSubmitted

    def encode(self) -> bytes:
        return self.assembled(self.route.signed_bytes(), self.signature, self.job.encode())

    @staticmethod
    def assembled(route: bytes, signature: str, job: bytes) -> bytes:
        """From a route and a job that are canonical bytes already. The names are in order."""
        return b'{"job":%b,"route":%b,"signature":"%b","type":"RequestRouted","version":1}' % (
            job, route, signature.encode()
        )  # fmt: skip


class RequestCancelled(Record):
    """Tell every worker of a pool that an admitted job was taken back."""

    type: Literal["RequestCancelled"] = "RequestCancelled"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    ingress: Coordinates


def tenant_job(tenant: TenantId, job_id: JobId) -> str:
    """One job's name across tenants. A tenant holds no slash, so two jobs never share one."""
    return f"{tenant}/{job_id}"
