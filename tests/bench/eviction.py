"""Cold loads on one seeded trace: the worker's rule, least recently used, and Belady's, who knows what comes."""

import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consumers.worker.residency import Hits, Owner, Resident, Slots, choose
from tests.bench.figures import Figure

SEED = 17
SLOTS = 12
TENANTS = 6
ADAPTERS_EACH = 10
REQUESTS = 20_000
# A tenant has work, and with it a share, as long as its jobs wait or run: here, while this many requests come.
WORK = 20
# A tenant is busy for a while, then another: what was hot cools down.
BURST = 400
MEGABYTES = (8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: whose adapter, its size, and what its load takes."""

    digest: str
    owner: str
    size: int
    load_ms: float


# Told of a request whose adapter has no slot, the number of the request, and who has one: who leaves.
Leave = Callable[[Asked, int, Sequence[str]], str]
Score = Callable[[Asked], Resident]


def trace() -> list[Asked]:
    """Zipf inside a tenant, uneven tenants, and one of them in a burst at any time."""
    dice = random.Random(SEED)
    weights = [1 / (rank + 1) for rank in range(ADAPTERS_EACH)]
    sizes = {(t, a): dice.choice(MEGABYTES) << 20 for t in range(TENANTS) for a in range(ADAPTERS_EACH)}
    asked = []
    for number in range(REQUESTS):
        busy = number // BURST % TENANTS
        tenant = busy if dice.random() < 0.5 else dice.choices(range(TENANTS), range(1, TENANTS + 1))[0]
        (adapter,) = dice.choices(range(ADAPTERS_EACH), weights)
        size = sizes[tenant, adapter]
        asked.append(
            Asked(digest=f"{tenant}-{adapter}", owner=f"tenant-{tenant}", size=size, load_ms=5.0 + size / (4 << 20))
        )
    return asked


def cold_loads(requests: Sequence[Asked], leave: Leave, touch: Callable[[Asked, int], None]) -> int:
    """How often an adapter had to be loaded."""
    resident: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for number, asked in enumerate(requests):
        touch(asked, number)
        if asked.digest in resident:
            continue
        if len(resident) == SLOTS:
            del resident[leave(asked, number, list(resident))]
        resident[asked.digest] = None
        loads += 1
    return loads


def by_rule(requests: Sequence[Asked], score: Score, *, shares: bool) -> Leave:
    """The worker's choice by a score. Without shares everything is one owner's."""
    known = {asked.digest: asked for asked in requests}
    asks: dict[str, list[int]] = {}
    for number, asked in enumerate(requests):
        asks.setdefault(asked.owner, []).append(number)

    def owner(asked: Asked) -> str:
        return asked.owner if shares else "all"

    def works(tenant: str, number: int) -> bool:
        before = bisect_right(asks[tenant], number)
        return before > 0 and number - asks[tenant][before - 1] < WORK

    def leave(asked: Asked, number: int, resident: Sequence[str]) -> str:
        scored = [
            Resident(digest=name, owner=owner(known[name]), score=one.score, idle=one.idle)
            for name, one in ((name, score(known[name])) for name in resident)
        ]
        working = {tenant if shares else "all": Owner() for tenant in asks if works(tenant, number)}
        choice = choose(owner(asked), Slots(count=SLOTS, residents=scored, working=working), set(resident))
        assert choice is not None, "every slot is free to leave here"
        return choice.digest

    return leave


def by_our_rule(requests: Sequence[Asked], *, shares: bool = True) -> int:
    hits = Hits()

    def score(asked: Asked) -> Resident:
        return Resident.measured(asked.digest, asked.owner, asked.size, hits.of(asked.digest), asked.load_ms)

    return cold_loads(requests, by_rule(requests, score, shares=shares), lambda asked, _: hits.hit(asked.digest))


def by_last_use(requests: Sequence[Asked], *, shares: bool = False) -> int:
    used: dict[str, int] = {}

    def touch(asked: Asked, number: int) -> None:
        used[asked.digest] = number

    def score(asked: Asked) -> Resident:
        return Resident(digest=asked.digest, owner=asked.owner, score=used[asked.digest])

    return cold_loads(requests, by_rule(requests, score, shares=shares), touch)


def by_next_use(requests: Sequence[Asked]) -> int:
    """Belady (1966): whoever is asked for last of all leaves."""
    places: dict[str, list[int]] = {}
    for number, asked in enumerate(requests):
        places.setdefault(asked.digest, []).append(number)

    def next_use(digest: str, number: int) -> int:
        after = bisect_right(places[digest], number)
        return places[digest][after] if after < len(places[digest]) else len(requests)

    def leave(_: Asked, number: int, resident: Sequence[str]) -> str:
        return max(resident, key=lambda name: next_use(name, number))

    return cold_loads(requests, leave, lambda _, __: None)


def measure() -> list[Figure]:
    """Ours beside LRU, which knows no shares; and both with the same shares, and both without."""
    requests = trace()
    ours, lru = by_our_rule(requests), by_last_use(requests)
    figures = {
        "": (ours, lru),
        "_belady": (by_next_use(requests), lru),
        "_shares": (ours, by_last_use(requests, shares=True)),
        "_no_shares": (by_our_rule(requests, shares=False), lru),
    }
    return [
        Figure(name=f"eviction_cold_loads{name}", value=value, unit="loads", peer=peer)
        for name, (value, peer) in figures.items()
    ]
