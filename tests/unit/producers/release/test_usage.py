"""A tenant's usage is its own, each job counted once."""

from datetime import UTC, datetime

import pytest

from producers.release.usage import TenantUsage
from schemas.jobs import Outcome
from schemas.metering import UsageRecorded
from schemas.record import Coordinates
from tests.fakes_ledger import at, make_admission, make_decision, make_usage

DAY = datetime(2026, 12, 2, tzinfo=UTC)
DAY_MS = round(DAY.timestamp() * 1000)
HOUR_MS = 3_600_000


def used(
    job_id: str,
    tenant: str = "acme",
    adapter: str = "support",
    outcome: Outcome = Outcome.COMPLETED,
    ended_at_ms: int = DAY_MS,
    ingress: Coordinates | None = None,
) -> UsageRecorded:
    """Five prompt and seven completion tokens."""
    ask = make_admission(job_id, make_decision(tenant, adapter), ingress=ingress or at(f"jobs.{tenant}"))
    return make_usage(ask, outcome=outcome).model_copy(update={"ended_at_ms": ended_at_ms})


def folded(
    *records: UsageRecorded, tenant: str = "acme", since: int | None = None, until: int | None = None
) -> TenantUsage:
    usage = TenantUsage(tenant, since, until)
    for record in records:
        usage.apply(record)
    return usage


def test_jobs_count_by_outcome_and_tokens_add_up() -> None:
    usage = folded(used("a"), used("b"), used("c", outcome=Outcome.FAILED))
    assert usage.total.outcomes == {Outcome.COMPLETED: 2, Outcome.FAILED: 1}
    assert (usage.total.jobs, usage.total.prompt_tokens, usage.total.completion_tokens) == (3, 15, 21)


def test_the_sums_of_adapters_and_of_days_are_the_total() -> None:
    records = [used("a"), used("b", adapter="legal"), used("c", adapter="legal", ended_at_ms=DAY_MS + 25 * HOUR_MS)]
    usage = folded(*records)
    legal, support = records[1].identity.adapter, records[0].identity.adapter
    assert {digest: found.jobs for digest, found in usage.adapters.items()} == {support: 1, legal: 2}
    assert {day: found.jobs for day, found in usage.days.items()} == {"2026-12-02": 2, "2026-12-03": 1}
    for parts in (usage.adapters, usage.days):
        assert sum(found.completion_tokens for found in parts.values()) == usage.total.completion_tokens


def test_another_tenants_record_leaves_no_trace() -> None:
    own, foreign = used("a"), used("a", tenant="globex", adapter="support", ended_at_ms=DAY_MS + 48 * HOUR_MS)
    assert vars(folded(own, foreign)) == vars(folded(own))
    assert vars(folded(foreign, tenant="nobody")) == vars(folded(tenant="nobody"))
    assert folded(own, foreign, tenant="globex").total.jobs == 1


def test_a_name_that_begins_like_another_is_another() -> None:
    assert folded(used("a", tenant="acme-2"), used("b", tenant="acm")).total.jobs == 0


def test_copies_of_a_record_count_once() -> None:
    first = used("a")
    usage = folded(first, first, first.model_copy(update={"attempt": 2}))
    assert (usage.total.jobs, usage.days["2026-12-02"].jobs, usage.total.completion_tokens) == (1, 1, 7)


def test_a_job_id_that_is_used_again_later_is_another_job() -> None:
    assert folded(used("nightly"), used("nightly", ended_at_ms=DAY_MS + 168 * HOUR_MS)).total.jobs == 2


@pytest.mark.parametrize(
    ("since", "until", "jobs"),
    [(None, None, 3), (DAY_MS, None, 2), (None, DAY_MS, 1), (DAY_MS, DAY_MS + 1, 1), (DAY_MS + 2, None, 0)],
)
def test_a_range_takes_its_beginning_and_leaves_its_end(since: int | None, until: int | None, jobs: int) -> None:
    records = [used(f"job-{n}", ended_at_ms=DAY_MS + n - 1) for n in range(3)]
    assert folded(*records, since=since, until=until).total.jobs == jobs
