"""The scheduler: who may be in the engine, and who starts next."""

from collections import Counter
from dataclasses import replace

from consumers.worker.plan import Entry, Part
from consumers.worker.scheduler import Scheduler
from ledger.fairness import jain
from schemas.jobs import JobClass
from schemas.record import Coordinates
from schemas.service import WaitReason
from tests.factories import make_manifest
from tests.routes import make_route
from tests.scheduling import DIGESTS, REGISTRY, entry, of_tenant, start


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


def test_the_tenant_that_was_served_least_starts_next() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=4), {DIGESTS[0], DIGESTS[1]}
    for number in range(8):
        scheduler.add(of_tenant("flood", DIGESTS[0], queued_at=number))
    assert len(start(scheduler, 8.0, resident)) == 4
    scheduler.add(of_tenant("calm", DIGESTS[1], queued_at=9.0))
    scheduler.ended(scheduler.running[0], completion_tokens=16)
    (following,) = start(scheduler, 9.0, resident)
    assert following.tenant == "calm"


def test_rows_that_a_tenant_had_use_for_lately_are_kept_for_it() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=16), {DIGESTS[0], DIGESTS[1]}
    for _ in range(3):
        scheduler.add(of_tenant("calm", DIGESTS[1]))
    for calm in start(scheduler, 0.0, resident):
        scheduler.ended(calm)
    for number in range(40):
        scheduler.add(of_tenant("flood", DIGESTS[0], queued_at=number))
    assert len(start(scheduler, 0.0, resident)) == 16 - 4
    for _ in range(3):
        scheduler.add(of_tenant("calm", DIGESTS[1], queued_at=1.0))
    assert [e.tenant for e in start(scheduler, 1.0, resident)] == ["calm"] * 3
    for calm in [e for e in scheduler.running if e.tenant == "calm"]:
        scheduler.ended(calm)
    assert len(start(scheduler, 60.0, resident)) == 6, "and not for one that went away"


def test_a_tenant_that_comes_back_brings_no_credit() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=2), {DIGESTS[0], DIGESTS[1]}
    for number in range(30):
        scheduler.add(of_tenant("steady", DIGESTS[0], queued_at=number))
    for number in range(20):
        start(scheduler, number, resident)
        scheduler.ended(scheduler.running[0], completion_tokens=16)
    for _ in range(6):
        scheduler.add(of_tenant("back", DIGESTS[1], queued_at=30.0))
    order = []
    for _ in range(6):
        order += [e.tenant for e in start(scheduler, 31.0, resident)]
        scheduler.ended(scheduler.running[0], completion_tokens=16)
    assert order.count("steady") >= 2


def test_a_job_near_its_deadline_goes_first() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=1), {DIGESTS[0], DIGESTS[1]}
    scheduler.add(of_tenant("acme", DIGESTS[0], queued_at=0.0))
    scheduler.add(of_tenant("acme", DIGESTS[1], queued_at=5.0, expires_at=7.0))
    assert [e.queued_at for e in start(scheduler, 6.0, resident)] == [5.0]


def test_batch_jobs_start_behind_interactive_ones_and_do_not_wait_for_ever() -> None:
    scheduler, resident = Scheduler(open_max=2, rows=1), {DIGESTS[0], DIGESTS[1]}
    patient = of_tenant("acme", DIGESTS[0], queued_at=0.0)
    route = patient.route.model_copy(update={"job_class": JobClass.BATCH})
    scheduler.add(replace(patient, route=route))
    scheduler.add(of_tenant("acme", DIGESTS[1], queued_at=1.0))
    (first,) = start(scheduler, 2.0, resident)
    assert first.queued_at == 1.0
    scheduler.ended(first)
    scheduler.add(of_tenant("acme", DIGESTS[1], queued_at=11.0))
    assert [e.queued_at for e in start(scheduler, 11.0, resident)] == [0.0]


def test_what_a_job_waited_for_longest_is_told_with_the_company_it_starts_in() -> None:
    scheduler, resident = Scheduler(open_max=1, rows=2), {DIGESTS[0]}
    scheduler.add(of_tenant("acme", DIGESTS[0], queued_at=0.0))
    (running,) = scheduler.plan(0.0, resident).start
    assert (running.waited_for, running.batch.rows, running.batch.adapters) == (WaitReason.QUEUE, 1, 1)
    scheduler.withdraw([running.entry])
    scheduler.started(running.entry)
    scheduler.add(of_tenant("acme", DIGESTS[1], queued_at=0.0))
    for now in (1.0, 2.0, 3.0):
        scheduler.plan(now, resident)
    scheduler.ended(running.entry)
    assert scheduler.plan(3.1, resident).load == DIGESTS[1]
    scheduler.loaded(DIGESTS[1], "acme", 40, 3.2)
    (start,) = scheduler.plan(3.3, {DIGESTS[1]}).start
    assert (start.waited_for, start.load_ms) == (WaitReason.SLOT, 40)


def test_an_owner_with_as_many_adapters_as_it_may_have_takes_turns_with_itself() -> None:
    scheduler, resident = Scheduler(open_max=3, rows=6, parts={"acme": Part(resident_max=1)}), set[str]()
    for number in range(2):
        scheduler.add(of_tenant("acme", DIGESTS[number], queued_at=number))
    scheduler.add(of_tenant("globex", DIGESTS[5], queued_at=2.0))
    assert {e.digest for e in start(scheduler, 2.0, resident)} == {DIGESTS[0], DIGESTS[5]}
    assert {e.digest for e in start(scheduler, 9.0, resident)} == set()
    for running in scheduler.running:
        scheduler.ended(running)
    assert {e.digest for e in start(scheduler, 9.1, resident)} == {DIGESTS[1]}


def test_twenty_tenants_on_four_slots_are_each_served() -> None:
    """Saturated by all: in a simulated minute nobody starves, and nobody is far ahead."""
    scheduler, resident = Scheduler(open_max=4, rows=8, quantum_s=1.0), set[str]()
    tenants = {f"tenant-{number}": f"sha256:{number + 100:064x}" for number in range(20)}
    served: Counter[str] = Counter()
    for step in range(1200):
        now = step / 20
        for tenant, digest in tenants.items():
            if sum(e.digest == digest for e in scheduler.queued) < 2:
                scheduler.add(of_tenant(tenant, digest, queued_at=now))
        served.update(e.tenant for e in start(scheduler, now, resident))
        scheduler.ended(scheduler.running[step % len(scheduler.running)], completion_tokens=16)
    assert len(served) == 20
    assert jain(served.values()) > 0.9
