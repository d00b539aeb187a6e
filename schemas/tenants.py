"""Tenants: what each may use, which aliases it is granted, and who may act in its name for a while."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas.ids import Alias, Count, TenantId
from schemas.jobs import DEADLINE_MS_MAX, TOKENS_MAX_LIMIT, JobClass
from schemas.record import Record

# Integers in Redis are doubles: sums of these stay far below 2^53.
QUOTA_MAX = 1 << 40

Quota = Annotated[int, Field(ge=1, le=QUOTA_MAX)]


class TenantState(StrEnum):
    """Whether a tenant is served."""

    ACTIVE = "active"
    REMOVED = "removed"


class TenantConfigured(Record):
    """A tenant's limits and classes. A later record replaces an earlier one. Quotas hold over all pools together."""

    type: Literal["TenantConfigured"] = "TenantConfigured"
    version: Literal[1] = 1
    tenant: TenantId
    state: TenantState = TenantState.ACTIVE
    classes: tuple[JobClass, ...] = (JobClass.INTERACTIVE, JobClass.BATCH)
    # Admitted, unfinished jobs of this tenant at once.
    concurrency_max: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    # The same under any one of its adapters; None: as many as the tenant.
    adapter_concurrency_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    # Output tokens of one job.
    tokens_max: Annotated[int, Field(ge=1)] = 4096
    # Prompt and output tokens, reserved at admission and corrected by usage: in any 60 s, and in one day (UTC).
    tokens_per_minute: Quota = 4_000_000
    tokens_per_day: Quota = 1_000_000_000
    interactive_deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] = 120_000
    batch_deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] = DEADLINE_MS_MAX
    # The tenant's part of what is shared, in proportion to the others' weights.
    weight: Annotated[int, Field(ge=1, le=1000)] = 100
    # So many of its resident adapters leave their slots for no other tenant.
    slots_floor: Annotated[int, Field(ge=0, le=64)] = 0
    # On one worker: adapters in slots at once, and loads from the store in a minute.
    resident_adapters_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    loads_per_minute: Annotated[int, Field(ge=1, le=100_000)] = 120
    # What one adapter of this tenant may be.
    adapter_bytes_max: Annotated[int, Field(ge=1, le=QUOTA_MAX)] = 4 << 30
    adapter_rank_max: Annotated[int, Field(ge=1, le=512)] = 512
    adapter_replicas_max: Annotated[int, Field(ge=1, le=64)] = 64
    # Kafka client quotas of the tenant's user.
    produce_bytes_per_s: Quota = 16 << 20
    consume_bytes_per_s: Quota = 64 << 20
    configured_by: str


class AliasGranted(Record):
    """A tenant may use one of its aliases, within these bounds. A later record of the pair replaces an earlier one.

    Without one in force, the alias is answered like one that does not exist.
    """

    type: Literal["AliasGranted"] = "AliasGranted"
    version: Literal[1] = 1
    tenant: TenantId
    alias: Alias
    # What was sold or agreed: a product, a contract, a ticket.
    entitlement: Annotated[str, Field(min_length=1, max_length=200)]
    classes: tuple[JobClass, ...] = (JobClass.INTERACTIVE, JobClass.BATCH)
    # Output tokens of one job under this alias; None leaves the tenant's limit alone.
    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX_LIMIT)] | None = None
    not_before_ms: Count = 0
    expires_at_ms: Count | None = None
    granted_by: str


class AliasWithdrawn(Record):
    """A grant ends, from the next job on. Jobs admitted before are not touched."""

    type: Literal["AliasWithdrawn"] = "AliasWithdrawn"
    version: Literal[1] = 1
    tenant: TenantId
    alias: Alias
    reason: Annotated[str, Field(min_length=1, max_length=500)]
    withdrawn_by: str
