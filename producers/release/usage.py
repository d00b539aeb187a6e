"""What a tenant used: a pure fold of `metering` that takes in no other tenant's record."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

from schemas.jobs import Outcome
from schemas.metering import UsageRecorded
from schemas.record import Coordinates


@dataclass(kw_only=True)
class Sum:
    """Jobs by outcome, and their tokens."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def jobs(self) -> int:
        return self.outcomes.total()

    def add(self, record: UsageRecorded) -> None:
        self.outcomes[record.outcome] += 1
        self.prompt_tokens += record.usage.prompt_tokens
        self.completion_tokens += record.usage.completion_tokens
        self.cached_tokens += record.usage.cached_tokens


class TenantUsage:
    """One tenant's sums over the jobs that ended from `since_ms` up to `until_ms`, exclusive."""

    def __init__(self, tenant: str, since_ms: int | None = None, until_ms: int | None = None) -> None:
        self.tenant = tenant
        self.since_ms = since_ms
        self.until_ms = until_ms
        self.total = Sum()
        self.adapters: dict[str, Sum] = {}
        self.days: dict[str, Sum] = {}
        # A job id alone is free again once nothing remembers it; with its place in the log it names one job for ever.
        self._counted: set[tuple[str, Coordinates]] = set()

    def apply(self, record: UsageRecorded) -> None:
        """Count a record that is this tenant's, of this time, and no copy of one that was counted."""
        job = (record.job_id, record.ingress)
        if record.identity.tenant != self.tenant or not self._in_time(record.ended_at_ms) or job in self._counted:
            return
        self._counted.add(job)
        self.total.add(record)
        self.adapters.setdefault(record.identity.adapter, Sum()).add(record)
        self.days.setdefault(day_of(record.ended_at_ms), Sum()).add(record)

    def _in_time(self, time_ms: int) -> bool:
        return (self.since_ms or 0) <= time_ms and (self.until_ms is None or time_ms < self.until_ms)


def day_of(time_ms: int) -> str:
    """The day in UTC, as 2026-12-02."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).date().isoformat()
