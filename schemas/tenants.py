"""Tenants: what each may use."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas.ids import TenantId
from schemas.jobs import DEADLINE_MS_MAX, JobClass
from schemas.record import Record


class TenantState(StrEnum):
    """Whether a tenant is served."""

    ACTIVE = "active"
    REMOVED = "removed"


class TenantConfigured(Record):
    """A tenant's limits and classes. A later record replaces an earlier one."""

    type: Literal["TenantConfigured"] = "TenantConfigured"
    version: Literal[1] = 1
    tenant: TenantId
    state: TenantState = TenantState.ACTIVE
    classes: tuple[JobClass, ...] = (JobClass.INTERACTIVE, JobClass.BATCH)
    # Admitted, unfinished jobs of this tenant at once, over all its pools.
    concurrency_max: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    tokens_max: Annotated[int, Field(ge=1)] = 4096
    interactive_deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] = 120_000
    batch_deadline_ms: Annotated[int, Field(ge=1, le=DEADLINE_MS_MAX)] = DEADLINE_MS_MAX
    configured_by: str
