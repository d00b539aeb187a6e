"""Which adapter leaves for another: the rule, case by case, and a tenant that never stops making versions."""

from collections import Counter

import pytest

from consumers.worker.fair import LoadLimits
from consumers.worker.residency import (
    HALF_LIFE,
    PAGE_BYTES,
    PLATFORM,
    Choice,
    Hits,
    Owner,
    Resident,
    Slots,
    choose,
)
from schemas.audit import EvictReason

EVEN = {"acme": Owner(), "globex": Owner()}


def resident(name: str, score: float = 1.0, *, idle: bool = False) -> Resident:
    """`acme-1` is an adapter of acme."""
    return Resident(digest=name, owner=name.partition("-")[0], score=score, idle=idle)


def chosen(
    newcomer: str,
    *residents: Resident,
    slots: int = 4,
    working: dict[str, Owner] | None = None,
    busy: str = "",
    floors: dict[str, int] | None = None,
) -> tuple[str, EvictReason] | None:
    free = {r.digest for r in residents} - set(busy.split())
    held = Slots(count=slots, residents=residents, working=EVEN if working is None else working)
    choice: Choice | None = choose(newcomer, held, free, floors)
    return (choice.digest, choice.reason) if choice else None


def test_inside_one_owner_the_lowest_score_goes_first() -> None:
    mine = [resident(f"acme-{n}", score) for n, score in enumerate((3.0, 1.0, 2.0, 4.0))]
    assert chosen("acme", *mine, working={"acme": Owner()}) == ("acme-1", EvictReason.OWN_SHARE)


def test_one_in_use_never_leaves() -> None:
    mine = [resident(f"acme-{n}", float(n)) for n in range(4)]
    only = {"acme": Owner()}
    assert chosen("acme", *mine, working=only, busy="acme-0 acme-1") == ("acme-2", EvictReason.OWN_SHARE)
    assert chosen("acme", *mine, working=only, busy="acme-0 acme-1 acme-2 acme-3") is None


def test_what_an_owner_holds_above_its_share_is_taken_and_its_lowest_first() -> None:
    held = [resident("acme-1", 5.0), resident("acme-2", 2.0), resident("acme-3", 9.0), resident("globex-1", 1.0)]
    assert chosen("globex", *held) == ("acme-2", EvictReason.RECLAIM_BORROWED)


def test_inside_anothers_share_nothing_is_taken() -> None:
    held = [resident("acme-1"), resident("acme-2"), resident("globex-1", 7.0), resident("globex-2", 3.0)]
    assert chosen("globex", *held) == ("globex-2", EvictReason.OWN_SHARE)
    assert chosen("globex", *held, busy="globex-1 globex-2") is None


def test_an_owner_above_its_share_takes_its_own_place() -> None:
    held = [resident("acme-1"), resident("acme-2"), resident("acme-3", 0.5), resident("globex-1", 0.1)]
    assert chosen("acme", *held) == ("acme-3", EvictReason.OWN_SHARE)


def test_an_idle_one_goes_first_inside_its_owner_only() -> None:
    held = [resident("acme-1"), resident("acme-2", 0.0, idle=True), resident("globex-1"), resident("globex-2")]
    assert chosen("acme", *held) == ("acme-2", EvictReason.IDLE)
    assert chosen("globex", *held) == ("globex-1", EvictReason.OWN_SHARE)


def test_an_owner_without_work_holds_nothing_of_its_own_but_its_floor() -> None:
    held = [resident("initech-1", 3.0), resident("initech-2", 5.0), resident("acme-1"), resident("globex-1")]
    assert chosen("acme", *held) == ("initech-1", EvictReason.RECLAIM_BORROWED)
    assert chosen("acme", *held, floors={"initech": 1}) == ("initech-1", EvictReason.RECLAIM_BORROWED)
    assert chosen("acme", *held, floors={"initech": 2}) == ("acme-1", EvictReason.OWN_SHARE)


def test_a_floor_stands_above_a_share() -> None:
    working = {"acme": Owner(floor=3), "globex": Owner()}
    held = [resident("acme-1"), resident("acme-2"), resident("acme-3"), resident("globex-1")]
    assert chosen("globex", *held, working=working) == ("globex-1", EvictReason.OWN_SHARE)


def test_weights_divide_the_slots() -> None:
    working = {"acme": Owner(weight=300), "globex": Owner(weight=100)}
    held = [resident("acme-1"), resident("acme-2"), resident("acme-3"), resident("globex-1")]
    assert chosen("globex", *held, working=working) == ("globex-1", EvictReason.OWN_SHARE)


def test_where_there_are_more_owners_than_slots_they_take_turns() -> None:
    working = {name: Owner() for name in ("acme", "globex", "initech", "hooli", "umbrella")}
    held = [resident("acme-1", 4.0), resident("globex-1", 2.0), resident("initech-1", 3.0), resident("hooli-1", 9.0)]
    assert chosen("umbrella", *held, working=working) == ("globex-1", EvictReason.TURN)
    held[1] = resident("acme-2", 9.0)
    assert chosen("umbrella", *held, working=working) == ("acme-1", EvictReason.RECLAIM_BORROWED)


def test_the_platforms_own_adapter_has_a_share_where_jobs_run_under_it() -> None:
    held = [resident("acme-1"), resident("acme-2"), resident("globex-1"), Resident(digest="z", owner=PLATFORM, score=9)]
    assert chosen("globex", *held) == ("z", EvictReason.RECLAIM_BORROWED)
    assert chosen("globex", *held, working={**EVEN, PLATFORM: Owner()}) == ("globex-1", EvictReason.OWN_SHARE)


def test_a_large_adapter_must_be_asked_for_more_often_to_stay() -> None:
    small = Resident.measured("small", "acme", PAGE_BYTES, hits=2.0, reload_ms=10.0)
    large = Resident.measured("large", "acme", 8 * PAGE_BYTES + 1, hits=2.0, reload_ms=10.0)
    assert small.score == 20.0
    assert large.score == pytest.approx(20.0 / 9)
    assert not small.idle
    assert Resident.measured("old", "acme", 1, hits=0.01, reload_ms=10.0).idle


def test_hits_halve_with_requests_and_are_forgotten() -> None:
    hits = Hits()
    hits.hit("a")
    for _ in range(HALF_LIFE):
        hits.hit("b")
    assert hits.of("a") == pytest.approx(0.5)
    hits.forget()
    assert hits.of("a") == pytest.approx(0.5)
    for _ in range(4 * HALF_LIFE):
        hits.hit("b")
    hits.forget()
    assert hits.of("a") == 0.0


def test_what_was_hot_long_ago_counts_less_than_what_is_used_now_and_one_request_less_than_many() -> None:
    hits = Hits()
    for name, times in (("once hot", 10), ("other", 4 * HALF_LIFE), ("now", 3), ("new", 1)):
        for _ in range(times):
            hits.hit(name)
    assert hits.of("once hot") < hits.of("new") < hits.of("now")


class House:
    """A worker's slots through time: every job loads what it needs, by the rule."""

    def __init__(self, slots: int, per_minute: int) -> None:
        self.slots = slots
        self.per_minute = per_minute
        self.resident: dict[str, str] = {}
        self.loads: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, EvictReason]] = Counter()
        self.hits = Hits()
        self.limits = LoadLimits()

    def ask(self, owner: str, digest: str, now: float, working: dict[str, Owner]) -> None:
        self.hits.hit(digest)
        if digest in self.resident or not self.limits.allows(owner, self.per_minute, now):
            return
        if len(self.resident) >= self.slots:
            residents = [
                Resident.measured(name, who, PAGE_BYTES, self.hits.of(name), 10.0)
                for name, who in self.resident.items()
            ]
            choice = choose(owner, Slots(count=self.slots, residents=residents, working=working), set(self.resident))
            assert choice is not None
            self.reasons[self.resident.pop(choice.digest), choice.reason] += 1
        self.resident[digest] = owner
        self.loads[owner] += 1
        self.limits.loaded(owner, now)


def five_minutes(*, offender: bool, per_minute: int = 30) -> House:
    """Three tenants use two adapters each; a fourth, where it is there, uses another version every second."""
    house = House(slots=8, per_minute=per_minute)
    others = ("acme", "globex", "initech")
    working = {name: Owner() for name in (*others, *(["offender"] if offender else []))}
    for second in range(300):
        for owner in others:
            house.ask(owner, f"{owner}-{second % 2}", float(second), working)
        if offender:
            house.ask("offender", f"offender-{second}", second + 0.5, working)
    return house


def test_a_tenant_that_keeps_making_versions_crowds_out_nobody() -> None:
    quiet, loud = five_minutes(offender=False), five_minutes(offender=True)
    for owner in ("acme", "globex", "initech"):
        assert loud.loads[owner] == quiet.loads[owner] == 2
    assert {owner for owner, _ in loud.reasons} == {"offender"}
    assert loud.loads["offender"] == 5 * 30


def test_without_a_limit_its_loads_are_at_its_rate_and_still_its_own_affair() -> None:
    loud = five_minutes(offender=True, per_minute=1000)
    assert loud.loads["offender"] == 300
    assert {owner for owner, _ in loud.reasons} == {"offender"}
