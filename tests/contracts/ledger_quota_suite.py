"""Tokens, adapters and fairness: the part of the ledger suite that is about how much, and about who is next."""

from dataclasses import replace
from typing import Any

from ledger.answers import RETRY_AFTER_MS, AdmitAnswer, Decision, Flagged, Full, Granted, Resource, Spent, Used
from schemas.jobs import JobClass, Limits
from schemas.topics import DAY_MS
from tests.contracts.ledger_bench import REQUEST, WINDOW_FULL, Bench, decision_for
from tests.fakes_ledger import USED, at, make_admission, make_decision


class QuotaSuite:
    """Tokens and adapters: what is reserved counts until usage says what was used."""

    async def decision(self, bench: Bench, tokens: int, **fields: Any) -> Decision:
        """A decision that reserves so many tokens, 10 of them the prompt's."""
        limits = Limits(tokens_max=tokens - 10, context_max=1 << 20, prompt_tokens=10)
        return await decision_for(bench, limits=limits, **fields)

    async def test_one_adapter_is_full_and_the_other_is_not(self, bench: Bench) -> None:
        first = await decision_for(bench)
        other = first.model_copy(update={"identity": make_decision(adapter="other").identity})
        await bench.ledger.admit(make_admission("job-1", first, adapter_concurrency_max=1))
        full = Full(resource=Resource.ADAPTER, retry_after_ms=RETRY_AFTER_MS)
        assert await bench.ledger.admit(make_admission("job-2", first, adapter_concurrency_max=1)) == full
        assert isinstance(await bench.ledger.admit(make_admission("job-3", other, adapter_concurrency_max=1)), Granted)

    async def test_the_tokens_of_a_day_are_reserved_whole_or_not_at_all(self, bench: Bench) -> None:
        decision = await self.decision(bench, 60)
        await bench.ledger.admit(make_admission("job-1", decision, tokens_per_day=100))
        answer = await bench.ledger.admit(make_admission("job-2", decision, tokens_per_day=100))
        assert isinstance(answer, Full)
        assert answer.resource is Resource.BUDGET
        assert 0 < answer.retry_after_ms <= DAY_MS
        assert (await bench.ledger.status()).spent["acme"].day == 60

    async def test_usage_frees_what_was_reserved_and_not_used(self, bench: Bench) -> None:
        ask = make_admission("job-1", await self.decision(bench, 60), tokens_per_day=100)
        await bench.ledger.admit(ask)
        await bench.ledger.settle("acme", "job-1", ask.ingress, Used(prompt_tokens=10, completion_tokens=20))
        spent = (await bench.ledger.status()).spent["acme"]
        assert (spent.minute, spent.day, spent.counter) == (30, 30, 50)
        again = make_admission("job-2", ask.decision, tokens_per_day=100, ingress=at())
        assert isinstance(await bench.ledger.admit(again), Granted)

    async def test_a_minute_is_full_until_what_was_admitted_leaves_it(self, bench: Bench) -> None:
        decision = await self.decision(bench, 60)
        await bench.ledger.admit(make_admission("job-1", decision, tokens_per_minute=100))
        answer = await bench.ledger.admit(make_admission("job-2", decision, tokens_per_minute=100))
        assert isinstance(answer, Full)
        assert answer.resource is Resource.RATE
        assert 59_000 <= answer.retry_after_ms <= 65_000

    async def test_a_tenants_tokens_are_counted_over_all_its_pools(self, bench: Bench) -> None:
        one, other = await self.decision(bench, 60), await self.decision(bench, 60, pool="other")
        await bench.ledger.admit(make_admission("job-1", one, tokens_per_day=100))
        answer = await bench.ledger.admit(make_admission("job-2", other, tokens_per_day=100))
        assert isinstance(answer, Full)
        assert answer.resource is Resource.BUDGET

    async def test_a_job_that_never_began_gives_its_tokens_back_when_its_lease_ends(self, bench: Bench) -> None:
        decision = (await self.decision(bench, 60)).model_copy(update={"expires_at_ms": await bench.now_ms() + 20})
        await bench.ledger.admit(make_admission("job-1", decision, grace_ms=0))
        await bench.pass_ms(25)
        status = await bench.ledger.status()
        assert (status.leases, status.tenants, status.spent["acme"].day) == (0, {}, 0)

    async def test_a_job_that_began_keeps_its_tokens_until_usage_is_known(self, bench: Bench) -> None:
        decision = (await self.decision(bench, 60)).model_copy(update={"expires_at_ms": await bench.now_ms() + 20})
        ask = make_admission("job-1", decision, grace_ms=0)
        await bench.ledger.admit(ask)
        await bench.ledger.begin("acme", "job-1", REQUEST, "7.0")
        await bench.pass_ms(25)
        status = await bench.ledger.status()
        assert (status.leases, status.spent["acme"].day) == (0, 60)
        await bench.ledger.settle("acme", "job-1", ask.ingress, Used())
        assert (await bench.ledger.status()).spent["acme"] == Spent()

    async def test_usage_beyond_the_reserve_counts_no_more_than_the_reserve(self, bench: Bench) -> None:
        ask = make_admission("job-1", await self.decision(bench, 60))
        await bench.ledger.admit(ask)
        await bench.ledger.settle("acme", "job-1", ask.ingress, Used(prompt_tokens=10, completion_tokens=500))
        assert (await bench.ledger.status()).spent["acme"].day == 60


class FairSuite:
    """Places: each active tenant has a share, and what is lent goes to the lowest counter."""

    async def ask(self, bench: Bench, tenant: str, number: int, window_max: int = 16, **fields: Any) -> AdmitAnswer:
        decision = await decision_for(bench, tenant, job_class=JobClass.BATCH, **fields)
        ask = make_admission(f"job-{number}", decision, concurrency_max=1000, window_max=window_max)
        return await bench.ledger.admit(ask)

    async def fill(self, bench: Bench, tenant: str, number: int = 40, **fields: Any) -> int:
        """As many jobs as there is room for; how many that were."""
        answers = [await self.ask(bench, tenant, n, **fields) for n in range(number)]
        return sum(isinstance(answer, Granted) for answer in answers)

    async def test_a_tenant_alone_leaves_the_headroom_free(self, bench: Bench) -> None:
        assert await self.fill(bench, "acme") == 14
        answer = await self.ask(bench, "acme", 99)
        assert answer == Full(resource=Resource.SHARE, retry_after_ms=RETRY_AFTER_MS)

    async def test_one_that_comes_beside_a_full_window_finds_a_place(self, bench: Bench) -> None:
        await self.fill(bench, "acme")
        assert isinstance(await self.ask(bench, "globex", 1), Granted)
        assert isinstance(await self.ask(bench, "globex", 2), Granted)
        assert await self.ask(bench, "globex", 3) == WINDOW_FULL

    async def test_active_tenants_share_by_weight(self, bench: Bench) -> None:
        await self.ask(bench, "acme", 0)
        await self.ask(bench, "globex", 0, weight=300)
        # 14 places: 3 and 10 by weight, and one more for the tenant that asks first for what is left.
        assert await self.fill(bench, "acme") == 4
        assert await self.fill(bench, "globex", weight=300) == 10

    async def test_places_that_end_go_to_the_tenant_within_its_share(self, bench: Bench) -> None:
        await self.fill(bench, "acme")
        await self.ask(bench, "globex", 1)
        await self.ask(bench, "globex", 2)
        status = await bench.ledger.status()
        assert status.leases == 16
        await self.end(bench, "acme", 0)
        assert await self.ask(bench, "acme", 99) == Full(resource=Resource.SHARE, retry_after_ms=RETRY_AFTER_MS)
        assert isinstance(await self.ask(bench, "globex", 3), Granted)

    async def end(self, bench: Bench, tenant: str, number: int) -> None:
        cancelled = await bench.ledger.cancel(tenant, f"job-{number}")
        assert isinstance(cancelled, Flagged)
        await bench.ledger.settle(tenant, f"job-{number}", cancelled.ingress, USED)

    async def test_a_borrowed_place_goes_to_the_lowest_counter_that_waits(self, bench: Bench) -> None:
        """Three tenants beyond their shares: the one that used least is first."""
        long, short = Limits(tokens_max=500, context_max=1024), Limits(tokens_max=1, context_max=1024)
        for tenant in ("acme", "globex", "initech"):
            await self.ask(bench, tenant, 0, limits=short)
        assert await self.fill(bench, "acme", limits=long) > 0
        assert await self.fill(bench, "globex", limits=short) > 0
        assert await self.ask(bench, "globex", 50, limits=short) != WINDOW_FULL
        await self.end(bench, "acme", 1)
        waits = await self.ask(bench, "acme", 51, limits=long)
        assert waits == Full(resource=Resource.SHARE, retry_after_ms=RETRY_AFTER_MS)

    async def test_reserved_places_are_lent_to_nobody(self, bench: Bench) -> None:
        decision = await decision_for(bench, job_class=JobClass.BATCH)
        asks = [
            replace(make_admission(f"job-{n}", decision, concurrency_max=99, window_max=16), reserved={"globex": 4})
            for n in range(20)
        ]
        answers = [await bench.ledger.admit(ask) for ask in asks]
        assert sum(isinstance(answer, Granted) for answer in answers) == 10

    async def test_a_tenant_that_comes_back_is_lifted_to_the_others(self, bench: Bench) -> None:
        first = await self.ask(bench, "acme", 0)
        second = await self.ask(bench, "globex", 0)
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        assert first.lift == 0
        assert second.lift == (await bench.ledger.status()).spent["acme"].counter == 32
        assert await bench.ledger.fairness() == {"acme": 32, "globex": 64}
        again = await self.ask(bench, "globex", 0)
        assert isinstance(again, Granted)
        assert (again.lift, again.repeated) == (32, True)
