"""What is said of a job while the registry, the ledger or the counter cannot be asked, and never: admitted."""

from collections.abc import Sequence

import pytest

from consumers.router.admission import IN_DOUBT, NOTICE_AFTER_MS
from consumers.router.decide import UNCOUNTED
from consumers.router.prompts import Count, NotCountable, Words
from ledger.registry import Registry
from ledger.store import LedgerUnavailable, LedgerUnreachable
from schemas.adapters import BaseManifest
from schemas.errors import InvalidRecord
from schemas.jobs import JobCancelled, JobSubmitted, RejectReason
from schemas.replies import JobWaiting
from schemas.topics import ADAPTERS
from tests.desk import Desk, FailingLedger, reply_of, request_of
from tests.factories import (
    approved,
    configured,
    make_base,
    make_job,
    make_manifest,
    make_registry,
    make_world,
    pointed,
    pool_of,
    ready,
    with_grants,
)
from tests.fakes_ledger import MemoryLedger


async def test_a_closed_ledger_admits_nothing_and_holds_batch_jobs_and_cancellations() -> None:
    desk = Desk(MemoryLedger(is_open=False))
    assert reply_of(await desk.post(make_job())).reason is RejectReason.NOT_READY
    assert reply_of(await desk.post(make_job(alias="nothing"))).retryable
    assert await desk.post(make_job(), "batch.acme") is None
    assert await desk.post(JobCancelled(job_id="job-x"), "cancel.acme") is None
    assert desk.admissions.ledger_problem is not None


async def test_a_view_that_cannot_be_trusted_admits_nothing_new() -> None:
    desk = Desk()
    desk.admissions.closed = "stale"
    assert reply_of(await desk.post(make_job())).reason is RejectReason.NOT_READY
    assert await desk.post(make_job(), "batch.acme") is None
    assert await desk.answer(desk.work(make_job(), in_doubt=True)) is None


async def test_a_job_whose_lease_may_have_been_taken_is_not_told_to_come_again() -> None:
    ledger = FailingLedger()
    desk = Desk(ledger)
    work = desk.work(make_job())
    ledger.failure = LedgerUnavailable()
    assert await desk.answer(work) is None
    desk.admissions.closed = "stale"
    assert await desk.answer(work) is None
    ledger.failure, desk.admissions.closed = LedgerUnreachable(), None
    assert await desk.answer(work) is None
    ledger.failure = None
    assert request_of(await desk.answer(work)).route.job_id == work.job_id


async def test_a_job_in_doubt_is_told_that_it_waits_and_so_is_what_comes_behind_it() -> None:
    ledger = FailingLedger()
    desk = Desk(ledger)
    ledger.failure = LedgerUnavailable()
    first, behind, other = (desk.work(make_job(alias=alias)) for alias in ("support", "support", "base"))
    assert await desk.answer(first) is None
    assert desk.admissions.notices([first, behind, other]) == []
    desk.clock.passed_ms = NOTICE_AFTER_MS
    told = [JobWaiting.decode(outgoing.value) for outgoing in desk.admissions.notices([first, behind, other])]
    assert [notice.job_id for notice in told] == [first.job_id, behind.job_id]
    assert {(notice.reason, notice.message) for notice in told} == {(RejectReason.NOT_READY, IN_DOUBT)}
    assert desk.admissions.notices([first, behind, other]) == [], "once"


async def test_a_job_of_which_the_ledger_says_that_it_holds_nothing_is_refused_again() -> None:
    desk = Desk(registry=make_registry([*make_world(), configured("acme", concurrency_max=1)]))
    assert await desk.post(make_job()) is not None
    work = desk.work(make_job(), in_doubt=True)
    assert reply_of(await desk.answer(work)).retryable


async def test_where_nobody_listens_an_interactive_job_is_told_to_come_again() -> None:
    ledger = FailingLedger()
    ledger.failure = LedgerUnreachable()
    assert reply_of(await Desk(ledger).post(make_job())).reason is RejectReason.NOT_READY


async def test_a_job_that_came_before_its_alias_is_counted_before_it_is_admitted() -> None:
    desk = Desk(registry=make_registry([entry for entry in make_world() if entry[0] != "aliases"]))
    work = desk.work(make_job(), "batch.acme")
    await desk.admissions.count([work])
    desk.registry.aliases.update(make_registry().aliases)
    desk.registry.grants.update(make_registry().grants)
    assert await desk.admissions.answer(work) is None, "never admitted without a count"
    assert request_of(await desk.answer(work)).route.limits.prompt_tokens == 2


class NoCounter(Words):
    """Cannot count while `away`."""

    away = True

    async def count(self, base: BaseManifest, jobs: Sequence[JobSubmitted]) -> list[Count]:
        if self.away:
            raise NotCountable("tests")
        return await super().count(base, jobs)


async def test_a_job_whose_alias_led_nowhere_is_counted_before_it_is_admitted_later() -> None:
    desk = Desk(registry=Registry())
    desk.admissions.closed = "the registry view was not read yet"
    work = desk.work(make_job(prompt="three words long"), "batch.acme")
    assert await desk.answer(work) is None
    for topic, _, record in with_grants(make_world()):
        desk.registry.apply(topic, desk.registry.positions.get(topic, 0), record.encode())
    desk.admissions.closed = None
    # Its alias became known after its part was counted.
    assert await desk.admissions.answer(work) is None
    assert request_of(await desk.answer(work)).route.limits.prompt_tokens == 3


async def test_an_alias_that_moved_to_another_base_is_counted_again() -> None:
    desk = Desk()
    desk.admissions.closed = "tests"
    work = desk.work(make_job(), "batch.acme")
    assert await desk.answer(work) is None
    other = make_base("other")
    moved = make_manifest(other.base, other.manifest.tokenizer, name="moved")
    more = [(ADAPTERS.name, other.base, other), approved(moved), pool_of(other.base, "second")]
    for topic, _, record in [*more, ready(other.base, "w-2", "second"), pointed("acme", "support", moved.digest, 2)]:
        desk.registry.apply(topic, desk.registry.positions.get(topic, 0), record.encode())
    desk.admissions.closed = None
    assert await desk.admissions.answer(work) is None
    assert request_of(await desk.answer(work)).route.identity.tokenizer == other.manifest.tokenizer


async def test_while_a_base_cannot_count_interactive_jobs_may_come_again_and_batch_jobs_wait() -> None:
    counter = NoCounter()
    desk = Desk(counter=counter)
    refusal = reply_of(await desk.post(make_job()))
    assert (refusal.reason, refusal.message, refusal.retryable) == (RejectReason.NOT_READY, UNCOUNTED, True)
    work = desk.work(make_job(), "batch.acme")
    assert await desk.answer(work) is None
    counter.away = False
    assert request_of(await desk.answer(work)).route.limits.prompt_tokens == 2


def test_a_registry_record_that_cannot_be_read_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRecord, match="tenants cannot be read at offset 7: "):
        Registry().apply("tenants", 7, b'{"type": "TenantConfigured", "ten')
