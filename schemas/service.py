"""How a job was served: what it met on arrival, why it waited, what it waited for, and how fast it ran."""

from enum import StrEnum

from schemas.ids import Count
from schemas.record import Value


class Residency(StrEnum):
    """Where a job's adapter was when the job reached its worker."""

    SLOT = "slot"
    HOST = "host"
    COLD = "cold"


class WaitReason(StrEnum):
    """What a job waited for the longest between its arrival at the worker and its first step."""

    #: Rows were taken.
    QUEUE = "queue"
    #: Every slot held an adapter in use.
    SLOT = "slot"
    #: Its adapter was on its way into a slot.
    LOAD = "load"
    #: Its rank family was kept out of the running batch.
    RANK = "rank"
    #: Its tenant was at a limit: loads per minute, resident adapters.
    QUOTA = "quota"


class Batch(Value):
    """The company in which a job took its first step: a number of this worker life, rows and distinct adapters."""

    number: Count
    rows: Count
    adapters: Count


class Service(Value):
    """How one job was served. Times are on the worker's monotonic clock."""

    residency: Residency
    waited_for: WaitReason
    # From the job's arrival at the worker to its start on the engine.
    queue_ms: Count
    # The time of a load that this job caused, which its tenant is charged for; zero where it caused none.
    load_ms: Count = 0
    # From the arrival to the first token; None where there was none.
    first_token_ms: Count | None = None
    # Mean time of an output token after the first; None below two tokens.
    token_us: Count | None = None
    # From the arrival to the end.
    completion_ms: Count
    batch: Batch | None = None
