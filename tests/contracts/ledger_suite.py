"""What every ledger must do: run against the fold, which is the specification, and against Redis."""

import asyncio
from dataclasses import replace

from ledger.answers import (
    Begun,
    BegunCancelled,
    BodyDiffers,
    CancelRemembered,
    Closed,
    Elsewhere,
    Ended,
    Expired,
    Fenced,
    Flagged,
    Granted,
    Refused,
    Settled,
    TakenBack,
    Unknown,
)
from schemas.jobs import JobClass
from tests.contracts.ledger_bench import REQUEST, TENANT_FULL, WINDOW_FULL, Bench, decision_for
from tests.contracts.ledger_quota_suite import FairSuite, QuotaSuite
from tests.fakes_ledger import USED, at, make_admission, make_decision, make_refusal, make_route


class AdmitSuite:
    """Leases: all of one or nothing, once per job."""

    async def test_a_job_that_fits_is_granted_a_lease_until_its_deadline_and_grace(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        answer = await bench.ledger.admit(ask)
        assert isinstance(answer, Granted)
        assert (answer.decision, answer.ingress, answer.repeated) == (ask.decision, ask.ingress, False)
        assert answer.epoch == 1
        assert answer.lease_ends_at_us == (ask.decision.expires_at_ms + ask.grace_ms) * 1000

    async def test_a_lease_holds_concurrency_a_place_and_a_reference(self, bench: Bench) -> None:
        decision = await decision_for(bench)
        await bench.ledger.admit(make_admission(decision=decision))
        status = await bench.ledger.status()
        assert (status.open, status.epoch, status.leases) == (True, 1, 1)
        assert (status.tenants, status.windows) == ({"acme": 1}, {"main/0": 1})
        assert status.references == {decision.identity.adapter: 1}
        assert await bench.ledger.references(decision.identity.adapter) == 1

    async def test_a_redelivered_job_gets_the_stored_decision_whatever_is_decided_now(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        first = await bench.ledger.admit(ask)
        moved = ask.decision.model_copy(update={"identity": make_decision(adapter="newer").identity, "partition": 3})
        assert isinstance(first, Granted)
        assert await bench.ledger.admit(replace(ask, decision=moved)) == replace(first, repeated=True)
        assert (await bench.ledger.status()).leases == 1

    async def test_a_resubmission_is_told_from_a_redelivery_by_the_first_coordinates(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        answer = await bench.ledger.admit(replace(ask, ingress=at()))
        assert isinstance(answer, Granted)
        assert (answer.ingress, answer.repeated) == (ask.ingress, True)

    async def test_the_same_id_with_another_body_differs(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        assert await bench.ledger.admit(make_admission(body="another", decision=ask.decision)) == BodyDiffers()

    async def test_two_tenants_may_use_the_same_job_id(self, bench: Bench) -> None:
        for tenant in ("acme", "globex"):
            answer = await bench.ledger.admit(make_admission(decision=await decision_for(bench, tenant)))
            assert isinstance(answer, Granted)
            assert not answer.repeated

    async def test_a_full_tenant_takes_nothing(self, bench: Bench) -> None:
        decision = await decision_for(bench)
        await bench.ledger.admit(make_admission("job-1", decision, concurrency_max=1))
        assert await bench.ledger.admit(make_admission("job-2", decision, concurrency_max=1)) == TENANT_FULL
        status = await bench.ledger.status()
        assert (status.tenants, status.windows, status.leases) == ({"acme": 1}, {"main/0": 1}, 1)

    async def test_a_tenant_is_full_over_all_partitions_together(self, bench: Bench) -> None:
        one, other = await decision_for(bench), await decision_for(bench, partition=1)
        await bench.ledger.admit(make_admission("job-1", one, concurrency_max=1))
        assert await bench.ledger.admit(make_admission("job-2", other, concurrency_max=1)) == TENANT_FULL

    async def test_a_window_is_shared_by_tenants_and_its_neighbour_is_free(self, bench: Bench) -> None:
        await bench.ledger.admit(make_admission("job-1", await decision_for(bench, "acme"), window_max=1))
        globex, neighbour = await decision_for(bench, "globex"), await decision_for(bench, "globex", partition=1)
        assert await bench.ledger.admit(make_admission("job-2", globex, window_max=1)) == WINDOW_FULL
        assert isinstance(await bench.ledger.admit(make_admission("job-3", neighbour, window_max=1)), Granted)

    async def test_a_window_of_zero_admits_nobody(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench), window_max=0)
        assert await bench.ledger.admit(ask) == WINDOW_FULL

    async def test_an_interactive_record_refused_for_capacity_is_refused_again(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench), window_max=0)
        await bench.ledger.admit(ask)
        assert await bench.ledger.admit(replace(ask, window_max=8)) == WINDOW_FULL
        assert isinstance(await bench.ledger.admit(replace(ask, window_max=8, ingress=at())), Granted)

    async def test_a_batch_record_that_was_full_is_admitted_when_there_is_room(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench, job_class=JobClass.BATCH), window_max=0)
        assert await bench.ledger.admit(ask) == WINDOW_FULL
        assert isinstance(await bench.ledger.admit(replace(ask, window_max=1)), Granted)

    async def test_a_job_past_its_deadline_is_not_admitted(self, bench: Bench) -> None:
        decision = await decision_for(bench, left_ms=20)
        await bench.pass_ms(25)
        assert await bench.ledger.admit(make_admission(decision=decision)) == Expired()
        assert (await bench.ledger.status()).leases == 0

    async def test_a_lease_ends_by_itself_after_deadline_and_grace(self, bench: Bench) -> None:
        decision = await decision_for(bench, left_ms=40)
        await bench.ledger.admit(make_admission("job-1", decision, concurrency_max=1, grace_ms=20))
        await bench.pass_ms(65)
        later = await decision_for(bench)
        assert isinstance(await bench.ledger.admit(make_admission("job-2", later, concurrency_max=1)), Granted)
        assert await bench.ledger.references(decision.identity.adapter) == 1

    async def test_many_at_once_never_overshoot(self, bench: Bench) -> None:
        decision = await decision_for(bench)
        asks = [make_admission(f"job-{number}", decision, concurrency_max=10, window_max=20) for number in range(100)]
        answers = await asyncio.gather(*(bench.ledger.admit(ask) for ask in asks))
        assert sum(isinstance(answer, Granted) for answer in answers) == 10
        assert (await bench.ledger.status()).tenants == {"acme": 10}


class RefuseSuite:
    """Permanent refusals are remembered by job id."""

    async def test_a_refused_job_is_refused_for_the_same_reason_ever_after(self, bench: Bench) -> None:
        refusal = make_refusal()
        refused = Refused(reason=refusal.reason, message=refusal.message, ingress=refusal.ingress)
        assert await bench.ledger.refuse(refusal) == refused
        assert await bench.ledger.refuse(replace(refusal, message="Other words.", ingress=at())) == refused
        assert await bench.ledger.admit(make_admission(decision=await decision_for(bench))) == refused

    async def test_a_job_admitted_before_stays_admitted(self, bench: Bench) -> None:
        first = await bench.ledger.admit(make_admission(decision=await decision_for(bench)))
        assert isinstance(first, Granted)
        assert await bench.ledger.refuse(make_refusal()) == replace(first, repeated=True)

    async def test_a_refused_id_with_another_body_differs(self, bench: Bench) -> None:
        await bench.ledger.refuse(make_refusal())
        assert await bench.ledger.refuse(make_refusal(body="another")) == BodyDiffers()


class BeginSuite:
    """One job, one offset; attempts rise; crashes are counted."""

    async def admitted(self, bench: Bench, left_ms: int = 60_000) -> None:
        await bench.ledger.admit(make_admission(decision=await decision_for(bench, left_ms=left_ms)))

    async def test_the_first_execution_is_attempt_one_with_its_time_left(self, bench: Bench) -> None:
        await self.admitted(bench)
        answer = await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        assert isinstance(answer, Begun)
        assert (answer.attempt, answer.crashes) == (1, 0)
        assert 50_000 < answer.remaining_ms <= 60_000

    async def test_a_second_execution_rises_and_counts_the_first_as_a_crash(self, bench: Bench) -> None:
        await self.admitted(bench)
        seen = [await bench.ledger.begin("acme", "job-1", REQUEST, f"7.{life}") for life in range(4)]
        assert [(answer.attempt, answer.crashes) for answer in seen if isinstance(answer, Begun)] == [
            (1, 0), (2, 1), (3, 2), (4, 3)
        ]  # fmt: skip

    async def test_a_begin_that_was_answered_into_the_void_is_no_crash(self, bench: Bench) -> None:
        await self.admitted(bench)
        seen = [await bench.ledger.begin("acme", "job-1", REQUEST, "7.0") for _ in range(3)]
        assert [(a.attempt, a.crashes) for a in seen if isinstance(a, Begun)] == [(1, 0), (2, 0), (3, 0)]

    async def test_an_orderly_hand_over_is_no_crash(self, bench: Bench) -> None:
        await self.admitted(bench)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        assert await bench.ledger.hand_over("acme", "job-1", REQUEST, 1)
        answer = await bench.ledger.begin("acme", "job-1", REQUEST, "7.1")
        assert isinstance(answer, Begun)
        assert (answer.attempt, answer.crashes) == (2, 0)

    async def test_a_hand_over_of_an_earlier_attempt_is_not_believed(self, bench: Bench) -> None:
        await self.admitted(bench)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.1")
        assert not await bench.ledger.hand_over("acme", "job-1", REQUEST, 1)
        assert not await bench.ledger.hand_over("acme", "unheard-of", REQUEST, 1)

    async def test_a_copy_at_another_offset_never_begins(self, bench: Bench) -> None:
        await self.admitted(bench)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        copy = at("requests.main", 6)
        assert await bench.ledger.begin("acme", "job-1", copy, "7.0") == Elsewhere(request=REQUEST)

    async def test_an_owner_that_lost_its_partition_cannot_begin(self, bench: Bench) -> None:
        await self.admitted(bench)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.10")
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.9") == Fenced()
        assert isinstance(await bench.ledger.begin("acme", "job-1", REQUEST, "8.0"), Begun)

    async def test_a_job_past_its_deadline_has_no_time_left(self, bench: Bench) -> None:
        await self.admitted(bench, left_ms=20)
        await bench.pass_ms(25)
        answer = await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        assert answer == Begun(attempt=1, crashes=0, remaining_ms=0)

    async def test_a_job_without_a_lease_is_unknown(self, bench: Bench) -> None:
        await bench.ledger.refuse(make_refusal("refused"))
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.0") == Unknown()
        assert await bench.ledger.begin("acme", "refused", REQUEST, "7.0") == Unknown()

    async def test_a_lost_job_is_adopted_from_its_route_and_leaves_one_attempt_out(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        route = make_route(ask, admitted_at_us=await bench.now_ms() * 1000)
        assert await bench.ledger.adopt(route) is True
        assert await bench.ledger.adopt(route) is False
        answer = await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        assert isinstance(answer, Begun)
        assert answer.attempt == 2
        assert (await bench.ledger.status()).tenants == {"acme": 1}
        assert isinstance(await bench.ledger.admit(ask), Granted)

    async def test_a_lost_job_that_was_taken_back_meanwhile_stays_so(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.cancel("acme", "job-1")
        await bench.ledger.adopt(make_route(ask, admitted_at_us=await bench.now_ms() * 1000))
        assert isinstance(await bench.ledger.begin("acme", "job-1", REQUEST, "7.0"), BegunCancelled)


class EndSuite:
    """Cancelling and settling."""

    async def test_cancelling_an_admitted_job_flags_it_and_tells_its_decision(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        flagged = Flagged(decision=ask.decision, ingress=ask.ingress)
        assert await bench.ledger.cancel("acme", "job-1") == flagged
        assert await bench.ledger.cancel("acme", "job-1") == flagged
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.0") == BegunCancelled(attempt=1)

    async def test_a_cancellation_that_comes_first_wins(self, bench: Bench) -> None:
        assert await bench.ledger.cancel("acme", "job-1") == CancelRemembered()
        assert await bench.ledger.cancel("acme", "job-1") == CancelRemembered()
        assert await bench.ledger.admit(make_admission(decision=await decision_for(bench))) == TakenBack()
        assert await bench.ledger.refuse(make_refusal()) == TakenBack()

    async def test_settling_ends_the_whole_lease_once(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        assert await bench.ledger.settle("acme", "job-1", ask.ingress, USED) == Settled(repeated=False)
        assert await bench.ledger.settle("acme", "job-1", ask.ingress, USED) == Settled(repeated=True)
        status = await bench.ledger.status()
        assert (status.leases, status.tenants, status.windows, status.references) == (0, {}, {}, {})

    async def test_settling_after_the_lease_ended_by_time_frees_nothing_twice(self, bench: Bench) -> None:
        over = make_admission("job-1", await decision_for(bench, left_ms=20), grace_ms=0)
        await bench.ledger.admit(over)
        await bench.pass_ms(25)
        await bench.ledger.admit(make_admission("job-2", await decision_for(bench)))
        assert await bench.ledger.settle("acme", "job-1", over.ingress, USED) == Settled(repeated=False)
        assert (await bench.ledger.status()).tenants == {"acme": 1}

    async def test_a_settled_job_is_over_and_its_decision_remembered(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        await bench.ledger.settle("acme", "job-1", ask.ingress, USED)
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.1") == Ended()
        assert await bench.ledger.cancel("acme", "job-1") == Ended()
        assert isinstance(await bench.ledger.admit(ask), Granted)

    async def test_usage_of_another_life_of_the_id_ends_nothing(self, bench: Bench) -> None:
        await bench.ledger.admit(make_admission(decision=await decision_for(bench)))
        assert await bench.ledger.settle("acme", "job-1", at(), USED) == Settled(repeated=True)
        assert (await bench.ledger.status()).leases == 1

    async def test_a_job_settled_before_the_ledger_knew_it_never_begins(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        assert await bench.ledger.settle("acme", "job-1", ask.ingress, USED) == Settled(repeated=False)
        assert await bench.ledger.settle("acme", "job-1", ask.ingress, USED) == Settled(repeated=True)
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.0") == Ended()
        assert await bench.ledger.admit(ask) == Ended()


class ClosedSuite:
    """A closed ledger does nothing for anybody."""

    async def test_every_call_is_refused_while_the_ledger_is_closed(self, bench: Bench) -> None:
        ask = make_admission(decision=await decision_for(bench))
        await bench.ledger.admit(ask)
        await bench.shut()
        route = make_route(make_admission("job-2", ask.decision), admitted_at_us=await bench.now_ms() * 1000)
        assert await bench.ledger.admit(ask) == Closed()
        assert await bench.ledger.refuse(make_refusal()) == Closed()
        assert await bench.ledger.begin("acme", "job-1", REQUEST, "7.0") == Closed()
        assert await bench.ledger.adopt(route) == Closed()
        assert await bench.ledger.cancel("acme", "job-1") == Closed()
        assert await bench.ledger.settle("acme", "job-1", ask.ingress, USED) == Closed()
        assert await bench.ledger.references(ask.decision.identity.adapter) == Closed()
        assert not await bench.ledger.hand_over("acme", "job-1", REQUEST, 1)
        assert not (await bench.ledger.status()).open


class LedgerSuite(AdmitSuite, QuotaSuite, FairSuite, RefuseSuite, BeginSuite, EndSuite, ClosedSuite):
    """All of it. A subclass gives the fixture `bench`."""
