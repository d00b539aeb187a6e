"""What is asked of the ledger and what it answers: plain values, the same for the fold and for Redis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.audit import Admitted
from schemas.digest import canonical
from schemas.ids import Alias, Count, JobId, KeyId, PoolId, TenantId
from schemas.jobs import JobClass, Limits, RejectReason, Route
from schemas.record import Coordinates, Identity, Value, strict_json
from schemas.topics import DAY_MS

# A lease outlives its job's deadline by this: clock skew between router and Redis, and the worker's watchdog.
LEASE_GRACE_MS = 30_000
# Decisions are remembered as long as the ingress topics retain: a redelivered job never resolves anew.
MEMORY_MS = 2 * DAY_MS
# How many leases whose time is over one call ends: bounds the call, and whatever is left counts as held.
SWEEP_MAX = 128
# What a client is told to wait for where a place is missing.
RETRY_AFTER_MS = 1_000
DECISION_BYTES_MAX = 64 << 10


class Decision(Value):
    """The whole decision on a job, as the ledger remembers it. What it holds, `Admitted` and `Route` hold too."""

    identity: Identity
    job_class: JobClass
    alias: Alias
    pool: PoolId
    partition: Count
    limits: Limits
    decided_on: dict[str, Count]
    expires_at_ms: Count
    weight: Annotated[int, Field(ge=1, le=1000)] = 100
    key_id: KeyId

    @property
    def reserve(self) -> int:
        """Tokens that are held until usage says how many were used."""
        return self.limits.prompt_tokens + self.limits.tokens_max

    def encode(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    @classmethod
    def decode(cls, content: bytes) -> "Decision":
        strict_json(content, DECISION_BYTES_MAX)
        return cls.model_validate_json(content)

    @classmethod
    def of_admitted(cls, admitted: Admitted) -> "Decision":
        # Of values that were validated with the record: a rebuild makes a hundred thousand of these.
        return cls.model_construct(
            identity=admitted.identity,
            job_class=admitted.job_class,
            alias=admitted.alias,
            pool=admitted.pool,
            partition=admitted.request_partition,
            limits=Limits.model_construct(
                tokens_max=admitted.tokens_max,
                context_max=admitted.context_max,
                prompt_tokens=admitted.prompt_tokens,
            ),
            decided_on=admitted.decided_on,
            expires_at_ms=admitted.expires_at_ms,
            weight=admitted.weight,
            key_id=admitted.key_id,
        )

    @classmethod
    def of_route(cls, route: Route) -> "Decision":
        return cls(
            identity=route.identity,
            job_class=route.job_class,
            alias=route.alias,
            pool=route.pool,
            partition=route.partition,
            limits=route.limits,
            decided_on=route.decided_on,
            expires_at_ms=route.expires_at_ms,
            weight=route.weight,
            key_id=route.key_id,
        )


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Ask for a lease. The tenant, class, digest, window, tokens, weight and deadline are the decision's."""

    job_id: JobId
    body_hash: str
    ingress: Coordinates
    decision: Decision
    #: Admitted, unfinished jobs of the tenant, over all pools.
    concurrency_max: int
    #: The same under this one adapter.
    adapter_concurrency_max: int
    #: Prompt and output tokens, reserved or used: of any 60 s, and of one day of UTC.
    tokens_per_minute: int
    tokens_per_day: int
    #: Admitted, unfinished jobs of the pool's partition; zero without a ready owner.
    window_max: int
    #: Places of the window that are held for one tenant each.
    reserved: Mapping[TenantId, int] = field(default_factory=dict)
    grace_ms: int = LEASE_GRACE_MS
    memory_ms: int = MEMORY_MS

    @property
    def tenant(self) -> TenantId:
        return self.decision.identity.tenant


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Remember a permanent refusal. A job whose body could not be read is not remembered: it has no body hash."""

    tenant: TenantId
    job_id: JobId
    body_hash: str
    ingress: Coordinates
    reason: RejectReason
    message: str
    memory_ms: int = MEMORY_MS


class Resource(StrEnum):
    """What was full."""

    #: As many unfinished jobs as the tenant, or one of its adapters, may have.
    TENANT = "tenant"
    ADAPTER = "adapter"
    #: The tokens of this minute, or of this day, are used or reserved.
    RATE = "rate"
    BUDGET = "budget"
    #: No place is free.
    WINDOW = "window"
    #: The places that are free are held for others, or it is another tenant's turn.
    SHARE = "share"


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The ledger takes nothing until it was rebuilt from the log: never an open door."""


@dataclass(frozen=True, kw_only=True)
class Granted:
    """The job holds a lease. `ingress` is the first record's: equal to yours, it is a redelivery."""

    decision: Decision
    ingress: Coordinates
    admitted_at_us: int
    lease_ends_at_us: int
    epoch: int
    #: What the tenant's fairness counter was lifted by.
    lift: int
    #: False for the call that took the lease; the stored decision otherwise, whatever was asked this time.
    repeated: bool


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The job id was refused for good, by the record at `ingress`.

    `message` is empty after a rebuild: the audit keeps the reason alone.
    """

    reason: RejectReason
    message: str
    ingress: Coordinates


@dataclass(frozen=True, kw_only=True)
class BodyDiffers:
    """The job id was taken by another body."""


@dataclass(frozen=True, kw_only=True)
class TakenBack:
    """A cancellation of this job arrived before it."""


@dataclass(frozen=True, kw_only=True)
class Full:
    """No place. Nothing was taken; the job id stays free."""

    resource: Resource
    retry_after_ms: int


@dataclass(frozen=True, kw_only=True)
class Expired:
    """The deadline passed before the job was admitted."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The job is over: nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Execute. `crashes` counts earlier executions that ended neither by settlement nor by a hand-over."""

    attempt: int
    crashes: int
    remaining_ms: int


@dataclass(frozen=True, kw_only=True)
class BegunCancelled:
    """Do not execute: answer `cancelled` under this attempt."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A copy: the job began at these coordinates, and only there it is executed and answered."""

    request: Coordinates


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """A newer producer of this partition began the job: the caller lost the partition."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """No lease of this job. After a verified route, `adopt` it and begin again."""


@dataclass(frozen=True, kw_only=True)
class Flagged:
    """The admitted job will not begin any more; tell the workers of the decision's pool. Equal on repeat."""

    decision: Decision
    ingress: Coordinates


@dataclass(frozen=True, kw_only=True)
class CancelRemembered:
    """The job had not arrived; when it does, it is taken back."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The lease is over."""

    repeated: bool


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a job used: its prompt and output tokens, and the time of a load that it caused."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    load_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a tenant has used or reserved in the last 60 s and on this day, and its fairness counter."""

    minute: int = 0
    day: int = 0
    counter: int = 0


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is held now. `windows` is by `<pool>/<partition>`, `adapters` by `<tenant>|<digest>`.

    `spent` is of the tenants that were admitted something lately; `now_us` is when that was, on the ledger's clock.
    """

    open: bool
    epoch: int
    leases: int
    tenants: dict[str, int] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    references: dict[str, int] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=dict)
    now_us: int = field(default=0, compare=False)


Remembered = Granted | Refused | BodyDiffers | TakenBack | Ended
AdmitAnswer = Remembered | Full | Expired | Closed
RefuseAnswer = Remembered | Closed
BeginAnswer = Begun | BegunCancelled | Elsewhere | Fenced | Ended | Unknown | Closed
CancelAnswer = Flagged | CancelRemembered | Ended | Closed
SettleAnswer = Settled | Closed
