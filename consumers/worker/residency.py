"""Which adapter leaves its slot for another. Pure: values in, one choice out.

Inside one owner the adapter with the lowest hits per page, weighed by what its reload costs, goes first. Another
owner's adapter is taken only as far as that owner holds more than its share, and never below its floor. Where nobody
exceeds its share by a whole adapter, tenants take turns. One that is in use or wanted never leaves.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from schemas.audit import EvictReason

# Hits are counted per page of resident bytes, so that a large adapter must be asked for more often to stay.
PAGE_BYTES = 1 << 20
# In requests to this worker, not in seconds, which forget at once where little is asked and never where much is.
HALF_LIFE = 200
# Below this many hits an adapter was not asked for lately.
IDLE_HITS = 0.05
# The owner of what belongs to no tenant: a base's zero adapter.
PLATFORM = ""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A tenant's part in the slots: its weight beside the others', and how many of its adapters nobody takes."""

    weight: int = 100
    floor: int = 0


@dataclass(frozen=True, kw_only=True)
class Resident:
    """An adapter in a slot. The lowest score of an owner goes first; an idle one was not asked for lately."""

    digest: str
    owner: str
    score: float
    idle: bool = False
    # What it takes of the budget: one slot, or its bytes of host memory.
    units: int = 1

    @classmethod
    def measured(
        cls, digest: str, owner: str, size: int, hits: float, reload_ms: float, *, in_bytes: bool = False
    ) -> "Resident":
        """Scored by expected reuse x reload cost / pages."""
        pages = math.ceil(max(1, size) / PAGE_BYTES)
        score, units = hits * reload_ms / pages, max(1, size) if in_bytes else 1
        return cls(digest=digest, owner=owner, score=score, idle=hits < IDLE_HITS, units=units)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who leaves, and why."""

    digest: str
    reason: EvictReason


@dataclass(frozen=True, kw_only=True)
class Slots:
    """A budget and who has a part in it: the tenants with work now. It counts slots, or bytes of host memory."""

    count: int
    residents: Sequence[Resident]
    working: Mapping[str, Owner] = field(default_factory=dict)

    def share(self, owner: str) -> float:
        """Slots x weight / weights of the owners with work; nothing for one without."""
        weights = sum(other.weight for other in self.working.values())
        return self.count * self.working[owner].weight / weights if owner in self.working else 0.0

    @property
    def held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for resident in self.residents:
            held[resident.owner] += resident.units
        return held


def choose(
    newcomer: str, slots: Slots, free: Set[str], floors: Mapping[str, int] | None = None, units: int = 1
) -> Choice | None:
    """Who leaves for an adapter of `newcomer`, or None: then it waits. `free` are those that may leave at all.

    `floors` are of owners without work; those with work bring their own. `units` is what the newcomer needs.
    """
    held, candidates = slots.held, [resident for resident in slots.residents if resident.digest in free]
    own = _lowest([resident for resident in candidates if resident.owner == newcomer])
    if own is not None and own.idle:
        return Choice(digest=own.digest, reason=EvictReason.IDLE)
    below = held[newcomer] < slots.share(newcomer)
    others = [
        resident
        for resident in candidates
        if resident.owner != newcomer and held[resident.owner] > _floor(resident.owner, slots, floors)
    ]
    borrowed = _lowest([r for r in others if held[r.owner] - r.units >= slots.share(r.owner)]) if below else None
    if borrowed is not None:
        return Choice(digest=borrowed.digest, reason=EvictReason.RECLAIM_BORROWED)
    if own is not None:
        return Choice(digest=own.digest, reason=EvictReason.OWN_SHARE)
    turn = _fullest(newcomer, units, slots, held, others)
    return Choice(digest=turn.digest, reason=EvictReason.TURN) if turn is not None else None


def _floor(owner: str, slots: Slots, floors: Mapping[str, int] | None) -> int:
    return slots.working[owner].floor if owner in slots.working else (floors or {}).get(owner, 0)


def _lowest(residents: Sequence[Resident]) -> Resident | None:
    return min(residents, key=lambda resident: (resident.score, resident.digest), default=None)


def _fullest(
    newcomer: str, units: int, slots: Slots, held: Counter[str], others: Sequence[Resident]
) -> Resident | None:
    """Of the owner that is fullest by its share, and at least as full as the newcomer would become.

    Everybody is within a whole adapter of its share here, so that a slot changes hands for a while.
    """
    mine = slots.share(newcomer)
    if not mine or held[newcomer] >= mine:
        return None
    would_be = (held[newcomer] + units) / mine

    def full(resident: Resident) -> float:
        share = slots.share(resident.owner)
        return held[resident.owner] / share if share else math.inf

    able = [resident for resident in others if full(resident) >= would_be]
    return min(able, key=lambda resident: (-full(resident), resident.score, resident.digest), default=None)


@dataclass
class Hits:
    """How often each adapter was asked for; a hit counts half after HALF_LIFE requests for any adapter.

    Between the least recently and the least frequently used, after Lee et al., LRFU (IEEE Transactions on Computers,
    2001). All owners share the count of requests, so that the scores of two owners compare.
    """

    _requests: int = 0
    _hits: dict[str, tuple[float, int]] = field(default_factory=dict)

    def hit(self, digest: str) -> None:
        self._requests += 1
        self._hits[digest] = (self.of(digest) + 1.0, self._requests)

    def of(self, digest: str) -> float:
        hits, at = self._hits.get(digest, (0.0, self._requests))
        return float(hits * 0.5 ** ((self._requests - at) / HALF_LIFE))

    def forget(self) -> None:
        """Drop what nobody asked for lately: versions come and go without end."""
        self._hits = {digest: pair for digest, pair in self._hits.items() if self.of(digest) >= IDLE_HITS}
