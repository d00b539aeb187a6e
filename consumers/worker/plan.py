"""What the scheduler is given, and what it says: values."""

from dataclasses import dataclass

from consumers.worker.residency import PLATFORM
from ledger.fairness import cost
from schemas.jobs import JobSubmitted, Route, tenant_job
from schemas.record import Coordinates
from schemas.service import Batch, Residency, WaitReason


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A verified job in this worker's queue. The identity block is the route's, unchanged."""

    request: Coordinates
    route: Route
    job: JobSubmitted
    queued_at: float
    expires_at: float
    # A job whose executions ended in two crashes runs with nothing beside it that it could take down.
    alone: bool = False
    # Whose adapter it runs under: its tenant's, or the platform's.
    owner: str = PLATFORM
    # Where that was when the job came.
    residency: Residency = Residency.COLD

    @property
    def digest(self) -> str:
        return self.route.identity.adapter

    @property
    def tenant(self) -> str:
        return self.route.identity.tenant

    @property
    def name(self) -> str:
        return tenant_job(self.tenant, self.route.job_id)

    def charge(self, weight: int) -> int:
        """What it may cost its tenant."""
        return cost(self.route.limits.prompt_tokens, self.route.limits.tokens_max, 0, weight)


@dataclass(frozen=True, kw_only=True)
class Start:
    """An entry that starts now: what it waited for, the company it starts in, and the load that it caused."""

    entry: Entry
    waited_for: WaitReason
    batch: Batch
    load_ms: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now. `load` needs a free slot; which digest leaves for it is residency's choice."""

    load: str | None = None
    # Digests to bring into host memory meanwhile, the first one first; what they wait for is a slot or a turn.
    prefetch: tuple[str, ...] = ()
    start: tuple[Start, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the registry says of a tenant's part in this worker."""

    weight: int = 100
    floor: int = 0
    #: Loads from the store in a minute, and adapters in slots at once; None where nothing limits them.
    loads_per_minute: int | None = None
    resident_max: int | None = None
