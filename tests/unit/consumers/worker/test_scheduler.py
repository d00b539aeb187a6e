"""The scheduler: who may be in the engine, and who starts next."""

from collections.abc import Iterator
from itertools import count

import pytest

from consumers.worker.residency import victim
from consumers.worker.scheduler import Entry, Scheduler
from schemas.record import Coordinates
from tests.factories import make_job, make_manifest, make_registry, make_world
from tests.routes import make_route

DIGESTS = [f"sha256:{number:064x}" for number in range(10)]
_numbers: Iterator[int] = count()


def entry(digest: str, queued_at: float = 0.0, alone: bool = False) -> Entry:
    request = make_route(REGISTRY, make_job())
    identity = request.route.identity.model_copy(update={"adapter": digest})
    return Entry(
        request=Coordinates(topic="requests.main", partition=0, offset=next(_numbers)),
        route=request.route.model_copy(update={"identity": identity}),
        job=request.job,
        queued_at=queued_at,
        expires_at=1000.0,
        alone=alone,
    )


REGISTRY = make_registry(make_world())


def start(scheduler: Scheduler, now: float, resident: set[str]) -> list[Entry]:
    """Follow a plan as the loop does, with loads that succeed at once."""
    started: list[Entry] = []
    for _ in range(20):
        plan = scheduler.plan(now, resident)
        for item in plan.start:
            scheduler.withdraw([item])
            scheduler.started(item)
        started += plan.start
        if plan.load is None:
            break
        if len(resident) >= scheduler.open_max:
            leaving = victim(dict.fromkeys(resident, 0.0), scheduler.wanted())
            assert leaving is not None, "a digest that is open has a slot to take"
            resident.discard(leaving)
        resident.add(plan.load)
    assert scheduler.running or not scheduler.queued_count, "work waits while nothing runs"
    return started


def test_jobs_of_two_digests_run_side_by_side_where_the_engine_mixes_them() -> None:
    scheduler = Scheduler(open_max=2, rows=8)
    for digest in (DIGESTS[0], DIGESTS[1], DIGESTS[0]):
        scheduler.add(entry(digest))
    assert {e.digest for e in start(scheduler, 0.0, set())} == {DIGESTS[0], DIGESTS[1]}
    assert len(scheduler.running) == 3


def test_an_engine_that_does_not_mix_runs_one_digest_at_a_time() -> None:
    scheduler = Scheduler(open_max=1, rows=8)
    for digest in (DIGESTS[0], DIGESTS[1], DIGESTS[0]):
        scheduler.add(entry(digest))
    assert [e.digest for e in start(scheduler, 0.0, set())] == [DIGESTS[0], DIGESTS[0]]


def test_no_more_rows_start_than_the_engine_has() -> None:
    scheduler = Scheduler(open_max=2, rows=3)
    for number in range(10):
        scheduler.add(entry(DIGESTS[number % 2], queued_at=number))
    resident = {DIGESTS[0], DIGESTS[1]}
    assert [e.queued_at for e in start(scheduler, 0.0, resident)] == [0, 1, 2]


def test_a_cold_digest_gets_its_turn_while_hot_ones_never_run_dry() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=4, quantum_s=1.0), set[str]()
    cold, now, waited = DIGESTS[9], 0.0, None
    scheduler.add(entry(cold, queued_at=0.5))
    for step in range(100):
        now = step / 10
        for hot in DIGESTS[:2]:
            while sum(e.digest == hot for e in scheduler.queued) < 2:
                scheduler.add(entry(hot, queued_at=now))
        if any(e.digest == cold for e in start(scheduler, now, resident)):
            waited = now
            break
        # Uneven lengths: one running job ends at a time, as in a saturated engine.
        scheduler.ended(scheduler.running[0])
    assert waited is not None
    assert waited <= 1.0 + 4 * 0.1 + 0.2


def test_only_one_digest_drains_at_a_time() -> None:
    scheduler, resident = Scheduler(open_max=3, rows=6, quantum_s=1.0), set[str]()
    for number in range(12):
        scheduler.add(entry(DIGESTS[number % 6]))
    start(scheduler, 0.0, resident)
    scheduler.plan(5.0, resident)
    assert sum(turn.draining for turn in scheduler._turns.values()) == 1


def test_a_suspect_runs_with_nothing_beside_it() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=4), {DIGESTS[0], DIGESTS[1]}
    scheduler.add(entry(DIGESTS[0], queued_at=0))
    scheduler.add(entry(DIGESTS[1], queued_at=1, alone=True))
    scheduler.add(entry(DIGESTS[0], queued_at=2))
    (first,) = start(scheduler, 3.0, resident)
    assert not first.alone
    scheduler.ended(first)
    (suspect,) = start(scheduler, 3.0, resident)
    assert suspect.alone
    assert start(scheduler, 3.0, resident) == []
    scheduler.ended(suspect)
    assert len(start(scheduler, 3.0, resident)) == 1


def test_an_engine_has_a_few_jobs_more_than_rows_at_hand() -> None:
    scheduler = Scheduler(open_max=2, rows=16)
    for _ in range(30):
        scheduler.add(entry(DIGESTS[0]))
    assert len(start(scheduler, 0.0, {DIGESTS[0]})) == 18


def test_a_withdrawn_job_never_starts() -> None:
    scheduler = Scheduler(open_max=2, rows=4)
    unwanted = entry(DIGESTS[0])
    scheduler.add(unwanted)
    scheduler.withdraw([unwanted])
    assert start(scheduler, 0.0, set()) == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(set(), "b"), ({"b"}, "a"), ({"a", "b", "c"}, None)],
)
def test_the_adapter_unused_for_longest_leaves_and_one_in_use_never(wanted: set[str], expected: str | None) -> None:
    assert victim({"a": 2.0, "b": 1.0, "c": 3.0}, wanted) == expected


def test_an_entry_keeps_the_routes_identity_unchanged() -> None:
    assert make_manifest("sha256:" + "0" * 64, "sha256:" + "1" * 64).digest.startswith("sha256:")
    request = make_route(REGISTRY)
    held = Entry(
        request=Coordinates(topic="requests.main", partition=0, offset=1),
        route=request.route,
        job=request.job,
        queued_at=0,
        expires_at=1,
    )
    assert held.route.identity is request.route.identity
    assert held.digest == request.route.identity.adapter
