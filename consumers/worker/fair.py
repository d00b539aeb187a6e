"""Whose job starts next in this worker, and what each job waited for. Pure: it is told the time."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ledger.fairness import cost
from schemas.ids import TenantId
from schemas.jobs import Limits
from schemas.service import WaitReason

WINDOW_S = 60.0


@dataclass
class Counters:
    """Virtual token counters of the tenants with work here (ledger/fairness.py has those of all pools)."""

    _counters: dict[TenantId, int] = field(default_factory=dict)

    def of(self, tenant: TenantId) -> int:
        return self._counters.get(tenant, 0)

    def arrived(self, tenant: TenantId, working: Iterable[TenantId]) -> None:
        """A tenant without work before: lifted to the lowest of those with work, so that it brings no credit."""
        lowest = min((self.of(other) for other in working), default=0)
        self._counters[tenant] = max(self.of(tenant), lowest)

    def started(self, tenant: TenantId, limits: Limits, weight: int) -> None:
        charge = cost(limits.prompt_tokens, limits.tokens_max, 0, weight)
        self._counters[tenant] = self.of(tenant) + charge

    def ended(self, tenant: TenantId, limits: Limits, weight: int, completion_tokens: int, load_ms: int) -> None:
        """What was not used is given back, and a load that the job caused is charged."""
        used = cost(limits.prompt_tokens, completion_tokens, load_ms, weight)
        held = cost(limits.prompt_tokens, limits.tokens_max, 0, weight)
        self._counters[tenant] = max(0, self.of(tenant) + used - held)


@dataclass
class WaitClocks:
    """How long the queue of each digest has been held up by what; a job's part is what passed since it came."""

    _clocks: dict[str, Counter[WaitReason]] = field(default_factory=dict)
    _at: float | None = None

    def pass_to(self, now: float, reasons: Mapping[str, WaitReason]) -> None:
        """Time passed, and these queues were held up by this."""
        passed = now - self._at if self._at is not None else 0.0
        self._at = now
        for digest, reason in reasons.items():
            clock = self._clocks.setdefault(digest, Counter())
            clock[reason] += passed  # type: ignore[assignment]
        for digest in self._clocks.keys() - reasons.keys():
            del self._clocks[digest]

    def reading(self, digest: str) -> Counter[WaitReason]:
        return Counter(self._clocks.get(digest, Counter()))

    def longest_since(self, digest: str, before: Counter[WaitReason]) -> WaitReason:
        """What a job that came at the earlier reading waited for the longest; the queue itself where it did not."""
        since = {reason: seconds - before[reason] for reason, seconds in self.reading(digest).items()}
        longest = max(since, key=lambda reason: since[reason], default=WaitReason.QUEUE)
        return longest if since.get(longest, 0) > 0 else WaitReason.QUEUE


@dataclass
class LoadLimits:
    """How often each owner made this worker load an adapter in the last minute."""

    _times: dict[str, deque[float]] = field(default_factory=dict)

    def allows(self, owner: str, per_minute: int | None, now: float) -> bool:
        times = self._times.get(owner)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        return per_minute is None or len(times or ()) < per_minute

    def loaded(self, owner: str, now: float) -> None:
        self._times.setdefault(owner, deque()).append(now)
