"""Who is admitted next, and how many places of a window are whose. Pure.

Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): a tenant's counter grows by
what its jobs cost over its weight, and the lowest counter goes first. A tenant that comes back is lifted to the others,
so that no credit is banked. A counter is a sum over periods that halves with every period that passed: it can be made
again from the jobs in any order, and an old debt is forgotten.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PERIOD_US = 60_000_000
PERIODS = 8
# A tenant without a lease and without an admission for so long comes back, and is lifted.
ACTIVE_US = 60_000_000
# A tenant that asked for a place of a window this recently has a share of it.
SEEN_US = 30_000_000
# How long one that found no place is waited for. It asks again several times in this time.
WAITING_US = 600_000
# An output token costs a step of its own; prompt tokens share one.
OUTPUT_COST = 2
# A load stalls every row of its worker: as if its tenant had run one of them meanwhile.
LOAD_COST_PER_MS = 1
WEIGHT_UNIT = 100
# Of a window, so much is lent to nobody: a tenant that comes back finds a place.
HEADROOM_PART = 8


def period_of(time_us: int) -> int:
    return time_us // PERIOD_US


def cost(prompt_tokens: int, output_tokens: int, load_ms: int, weight: int) -> int:
    """What a job adds to its tenant's counter."""
    return (prompt_tokens + OUTPUT_COST * output_tokens + LOAD_COST_PER_MS * load_ms) * WEIGHT_UNIT // weight


def counter(periods: Mapping[int, int], now_us: int) -> int:
    """A tenant's counter: costs by the period of their admission, halved for every period since."""
    now = period_of(now_us)
    return sum(costs >> (now - period) for period, costs in periods.items() if 0 <= now - period < PERIODS)


def jain(values: Iterable[int]) -> float:
    """Jain's index (1984): 1 where all have the same, 1/n where one has all."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One tenant's part in a window."""

    weight: int
    held: int
    #: Places that are held for it alone.
    reserved: int = 0


def shares(window_max: int, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Places that are each active tenant's own: what is reserved for it, and its part of what is left to all."""
    left = lendable(window_max, claims)
    weights = sum(claim.weight for claim in claims.values() if claim.weight)
    return {
        tenant: claim.reserved + (max(1, left * claim.weight // weights) if claim.weight else 0)
        for tenant, claim in claims.items()
    }


def lendable(window_max: int, claims: Mapping[str, Claim]) -> int:
    """Places without what is reserved and without the headroom."""
    return max(0, window_max - sum(claim.reserved for claim in claims.values()) - window_max // HEADROOM_PART)


def room(tenant: str, window_max: int, total: int, claims: Mapping[str, Claim]) -> tuple[int, bool]:
    """How many places `tenant` could take now, and whether it is within its share.

    A claim of weight 0 is of a tenant that is not active, and for which places are reserved.
    """
    owed = shares(window_max, claims)
    free = window_max - total
    mine = claims[tenant]
    if mine.held < owed[tenant]:
        return free, True
    unused = sum(max(0, owed[other] - claim.held) for other, claim in claims.items() if other != tenant)
    return free - unused - window_max // HEADROOM_PART, False
