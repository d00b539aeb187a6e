"""What is loaded and fetched ahead, how often, and whose slot a newcomer gets."""

from consumers.worker.plan import Part
from consumers.worker.scheduler import Scheduler
from schemas.record import Coordinates
from tests.scheduling import DIGESTS, entry, of_tenant, start


def test_an_owner_that_loaded_too_often_waits_for_its_quota_and_holds_no_slot_meanwhile() -> None:
    scheduler = Scheduler(open_max=2, rows=4, parts={"acme": Part(loads_per_minute=1)})
    scheduler.loaded(DIGESTS[5], "acme", 1, 0.0)
    scheduler.add(of_tenant("acme", DIGESTS[0]))
    scheduler.add(of_tenant("globex", DIGESTS[1]))
    plan = scheduler.plan(1.0, set())
    assert plan.load == DIGESTS[1]
    assert scheduler.wanted() == {DIGESTS[1]}
    assert scheduler.plan(61.0, {DIGESTS[1]}).load == DIGESTS[0]


def cold_wait(lengths: list[int], step_s: float = 0.025) -> float:
    """Seconds until a cold digest starts beside hot ones whose jobs have these lengths and never end to come."""
    scheduler, resident, left = Scheduler(open_max=len(lengths), rows=32), set[str](), dict[Coordinates, int]()
    hot, cold, came, now = DIGESTS[: len(lengths)], DIGESTS[9], 2.0, 0.0
    while now < 60.0:
        for digest, length in zip(hot, lengths, strict=True):
            while sum(e.digest == digest for e in scheduler.queued) < 2:
                scheduler.add(of_tenant("acme", digest, now, length))
        if now >= came and not any(e.digest == cold for e in scheduler.queued):
            scheduler.add(of_tenant("acme", cold, now, 8))
        for started in start(scheduler, now, resident):
            if started.digest == cold:
                return now - came
            left[started.request] = started.route.limits.tokens_max
        for running in scheduler.running:
            left[running.request] -= 1
            if not left[running.request]:
                scheduler.ended(running, running.route.limits.tokens_max)
        now += step_s
    raise AssertionError("the newcomer never starts")


def test_a_long_decode_does_not_hold_up_a_newcomer_where_a_shorter_one_can_drain() -> None:
    # The digest with the long decodes opened first: by age alone it drains, and the newcomer waits for 10.4 s.
    assert cold_wait([400, 16, 16, 16]) < 1.0
    assert cold_wait([48, 32, 24, 16]) < 1.0


def test_a_digest_that_held_its_slot_for_long_drains_whatever_it_decodes() -> None:
    scheduler = Scheduler(open_max=2, rows=8)
    for digest, tokens in ((DIGESTS[0], 400), (DIGESTS[1], 16)):
        scheduler.add(of_tenant("acme", digest, tokens=tokens))
        scheduler.add(of_tenant("acme", digest, tokens=tokens))
    resident: set[str] = set()
    start(scheduler, 0.0, resident)
    assert scheduler._drains_in(DIGESTS[1], 9.9) < scheduler._drains_in(DIGESTS[0], 9.9)
    assert scheduler._drains_in(DIGESTS[0], 10.1) == scheduler._drains_in(DIGESTS[1], 10.1)


def test_digests_that_wait_are_brought_near_in_the_order_of_their_turns() -> None:
    scheduler, resident = Scheduler(open_max=1, rows=2), {DIGESTS[0]}
    for number, digest in enumerate(DIGESTS[:4]):
        scheduler.add(entry(digest, queued_at=float(number)))
    start(scheduler, 0.0, resident)
    assert scheduler.plan(0.1, resident).prefetch == tuple(DIGESTS[1:4])


def test_what_is_in_host_memory_needs_no_load_from_the_store() -> None:
    scheduler = Scheduler(open_max=2, rows=4, parts={"acme": Part(loads_per_minute=1)})
    scheduler.loaded(DIGESTS[5], "acme", 1, 0.0)
    scheduler.add(of_tenant("acme", DIGESTS[0]))
    assert scheduler.plan(1.0, set()).load is None
    assert scheduler.plan(1.1, set(), {DIGESTS[0]}).load == DIGESTS[0]


def test_a_copy_from_host_memory_is_no_load_from_the_store() -> None:
    scheduler = Scheduler(open_max=2, rows=4, parts={"acme": Part(loads_per_minute=1)})
    scheduler.loaded(DIGESTS[5], "acme", 1, 0.0, from_store=False)
    scheduler.add(of_tenant("acme", DIGESTS[0]))
    assert scheduler.plan(1.0, set()).load == DIGESTS[0]


def test_turns_that_open_together_load_no_more_than_their_owner_may() -> None:
    scheduler = Scheduler(open_max=4, rows=4, parts={"acme": Part(loads_per_minute=2)})
    scheduler.loaded(DIGESTS[5], "acme", 1, 0.0)
    for digest in DIGESTS[:3]:
        scheduler.add(of_tenant("acme", digest))
    plan = scheduler.plan(1.0, set())
    assert scheduler.wanted() == {plan.load}
    assert plan.prefetch == ()


def test_a_load_counts_before_it_is_over() -> None:
    scheduler = Scheduler(open_max=2, rows=4, parts={"acme": Part(loads_per_minute=1)})
    scheduler.coming(DIGESTS[5], "acme")
    scheduler.add(of_tenant("acme", DIGESTS[0]))
    assert scheduler.plan(1.0, set()).load is None
    scheduler.came(DIGESTS[5])
    assert scheduler.plan(1.0, set()).load == DIGESTS[0]
