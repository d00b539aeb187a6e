"""Whose job starts next in this worker, and what each job waited for. Pure: it is told the time."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ledger.fairness import cost
from schemas.ids import TenantId
from schemas.jobs import Limits
from schemas.service import WaitReason

WINDOW_S = 60.0
DEMAND_HALF_S = 5.0
# A tenant whose demand has faded below this has no work here any more.
DEMAND_MIN = 0.25
# So many times its part is what a tenant may want for a moment without being held back.
GREEDY = 2
# One job more than rows for so many rows: an engine has the next one at hand when a row gets free, instead of a step or
# two without it while that one begins.
ROWS_PER_SPARE = 8


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
class Demands:
    """How many jobs each tenant had here at once lately: the most, halved every DEMAND_HALF_S."""

    _peaks: dict[TenantId, tuple[float, float]] = field(default_factory=dict)

    def at(self, now: float, wanted: Mapping[TenantId, int]) -> dict[TenantId, int]:
        """By tenant, with what each has now. One whose last job is long over is forgotten."""
        for tenant in self._peaks.keys() | wanted.keys():
            peak, since = self._peaks.get(tenant, (0.0, now))
            faded = peak * 0.5 ** ((now - since) / DEMAND_HALF_S)
            self._peaks[tenant] = (max(faded, wanted.get(tenant, 0)), now)
        self._peaks = {tenant: pair for tenant, pair in self._peaks.items() if pair[0] >= DEMAND_MIN}
        return {tenant: math.ceil(peak) for tenant, (peak, _) in self._peaks.items()}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The engine's rows, who runs in how many of them, and the weights and demands of tenants with work lately."""

    count: int
    running: Counter[TenantId]
    weights: Mapping[TenantId, int]
    demands: Mapping[TenantId, int]

    def has_room(self, tenant: TenantId) -> bool:
        """Whether one more job of a tenant may start.

        Any free row, and a few at hand. But one that wants far more than its part leaves the rows to others that they
        had use for lately, up to their parts: their next jobs start at once, where they would wait for a whole job of
        this one's otherwise.
        """
        total, part = self.running.total(), self._part(tenant)
        kept = sum(self._kept(other) for other in self.weights if other != tenant)
        if not kept or self.running[tenant] < part or self.demands.get(tenant, 0) <= GREEDY * part:
            return total < self.count + self.count // ROWS_PER_SPARE
        return total < self.count - kept

    def _part(self, tenant: TenantId) -> float:
        return self.count * self.weights.get(tenant, 0) / sum(self.weights.values()) if self.weights else 0.0

    def _kept(self, tenant: TenantId) -> int:
        """One more than it had lately, up to its part."""
        return max(0, min(math.floor(self._part(tenant)), self.demands.get(tenant, 0) + 1) - self.running[tenant])


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

    def allows(self, owner: str, per_minute: int | None, now: float, coming: int = 0) -> bool:
        """Whether one more may begin beside those that are on their way."""
        times = self._times.get(owner)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        return per_minute is None or len(times or ()) + coming < per_minute

    def loaded(self, owner: str, now: float) -> None:
        self._times.setdefault(owner, deque()).append(now)
