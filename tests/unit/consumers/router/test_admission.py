"""One answer to each piece of work, whatever the ledger says or fails to say. The ledger is the fold in memory."""

import pytest

from consumers.router.admission import FULL, NO_WORKER, NOTICE_AFTER_MS
from consumers.router.effects import NOTHING
from ledger.answers import Resource
from schemas.adapters import AdapterRevoked
from schemas.audit import Admitted, CancelRequested, Rejected
from schemas.jobs import JobCancelled, RejectReason, RequestCancelled
from schemas.keys import KeyRole
from schemas.record import Record
from schemas.replies import JobWaiting
from schemas.signing import verify
from schemas.topics import ADAPTERS
from tests.desk import Desk, reply_of, request_of
from tests.factories import (
    configured,
    make_job,
    make_registry,
    make_world,
)


async def test_a_route_is_one_record_whose_bytes_are_its_own_encoding() -> None:
    desk = Desk()
    job = make_job(session_id="s", messages=None)
    effect = await desk.post(job)
    request = request_of(effect)
    assert effect is not None
    assert effect.appends[0].value == request.encode()
    route = request.route
    verify(route, request.signature, route.key_id, KeyRole.ROUTE, desk.registry.keys(KeyRole.ROUTE))
    ((key, admitted),) = effect.audit
    assert isinstance(admitted, Admitted)
    assert key == route.identity.adapter == admitted.identity.adapter
    assert (admitted.body_hash, admitted.ingress) == (job.body_hash, route.ingress)
    assert ("correlation_id", b"c-1") in effect.appends[0].headers


async def test_identity_in_a_header_is_ignored() -> None:
    assert request_of(await Desk().post(make_job())).route.identity.tenant == "acme"


async def test_a_redelivered_record_gives_the_same_bytes_although_its_alias_went_away() -> None:
    desk = Desk()
    work = desk.work(make_job())
    first = await desk.answer(work)
    digest = request_of(first).route.identity.adapter
    revoked = AdapterRevoked(adapter=digest, reason="broken", revoked_by="tests")
    desk.registry.apply(ADAPTERS.name, 99, revoked.encode())
    again = await desk.answer(work)
    assert first is not None
    assert again is not None
    assert again.appends[0].value == first.appends[0].value
    assert again.audit == first.audit


async def test_the_same_job_at_another_place_is_acknowledged_and_appends_nothing() -> None:
    desk, job = Desk(), make_job()
    await desk.post(job)
    assert await desk.post(job) == NOTHING
    assert reply_of(await desk.post(make_job(job.job_id, prompt="Another."))).reason is RejectReason.JOB_ID_REUSED


async def test_a_refused_job_is_refused_in_the_same_words_again() -> None:
    desk, job = Desk(), make_job(alias="nothing")
    first = await desk.post(job)
    second = await desk.post(job)
    one, two = reply_of(first), reply_of(second)
    assert (one.reason, one.message) == (two.reason, two.message)
    assert one.ingress != two.ingress
    assert first is not None
    ((key, rejected),) = first.audit
    assert key == "tenant/acme"
    assert isinstance(rejected, Rejected)
    assert (rejected.ingress, rejected.body_hash) == (one.ingress, job.body_hash)


@pytest.mark.parametrize(
    ("limits", "reason", "longest_ms"),
    [
        ({"concurrency_max": 1}, RejectReason.CONCURRENCY, 1_000),
        ({"adapter_concurrency_max": 1}, RejectReason.CONCURRENCY, 1_000),
        ({"tokens_per_minute": 20}, RejectReason.RATE, 65_000),
        ({"tokens_per_day": 20}, RejectReason.BUDGET, 86_400_000),
    ],
)
async def test_without_a_place_an_interactive_job_may_come_again_and_a_batch_job_waits(
    limits: dict[str, int], reason: RejectReason, longest_ms: int
) -> None:
    desk = Desk(registry=make_registry([*make_world(), configured("acme", **limits)]))
    await desk.post(make_job())
    full = await desk.post(make_job())
    reply = reply_of(full)
    assert (reply.reason, reply.retryable) == (reason, True)
    assert reply.retry_after_ms is not None
    assert 0 < reply.retry_after_ms <= longest_ms
    assert full is not None
    assert full.audit == ()
    assert await desk.post(make_job(), "batch.acme") is None


async def test_a_pool_without_a_ready_worker_says_so() -> None:
    desk = Desk(registry=make_registry([entry for entry in make_world() if entry[0] != "workers"]))
    reply = reply_of(await desk.post(make_job()))
    assert (reply.reason, reply.message) == (RejectReason.NOT_READY, NO_WORKER)
    assert await desk.post(make_job(), "batch.acme") is None


async def test_a_full_window_and_a_full_share_are_told_apart() -> None:
    desk = Desk()
    for number in range(12):
        await desk.post(make_job(f"job-{number}"))
    alone = reply_of(await desk.post(make_job()))
    assert (alone.reason, alone.message) == (RejectReason.CAPACITY, FULL[Resource.SHARE][1])


async def test_a_batch_job_that_waits_is_told_once_for_what() -> None:
    desk = Desk(registry=make_registry([*make_world(), configured("acme", concurrency_max=1)]))
    await desk.post(make_job())
    work = desk.work(make_job("waits"), "batch.acme")
    assert await desk.answer(work) is None
    assert desk.admissions.notices([work]) == [], "not of a moment's waiting"
    desk.clock.passed_ms = NOTICE_AFTER_MS
    (notice,) = desk.admissions.notices([work])
    told = JobWaiting.decode(notice.value)
    assert (notice.topic, told.job_id, told.reason) == ("stream.acme", "waits", RejectReason.CONCURRENCY)
    assert await desk.answer(work) is None
    assert desk.admissions.notices([work]) == []


async def test_a_deadline_that_passes_at_the_ledger_is_remembered() -> None:
    desk = Desk()
    job = make_job(deadline_ms=1)
    desk.ledger.now_us += 5_000
    assert reply_of(await desk.post(job)).reason is RejectReason.DEADLINE_PASSED
    assert reply_of(await desk.post(job)).reason is RejectReason.DEADLINE_PASSED


async def test_an_early_cancellation_wins_and_a_late_one_reaches_the_workers() -> None:
    desk = Desk()
    early = await desk.post(JobCancelled(job_id="early"), "cancel.acme")
    assert early is not None
    ((key, requested),) = early.audit
    assert isinstance(requested, CancelRequested)
    assert (key, requested.identity, early.appends) == ("tenant/acme", None, ())
    assert reply_of(await desk.post(make_job("early"))).reason is RejectReason.CANCELLED
    route = request_of(await desk.post(make_job("late"))).route
    late = await desk.post(JobCancelled(job_id="late"), "cancel.acme")
    assert late is not None
    cancelled = RequestCancelled.decode(late.appends[0].value)
    assert (cancelled.identity, cancelled.ingress) == (route.identity, route.ingress)
    assert late.audit[0][0] == route.identity.adapter


BROKEN: dict[str, tuple[bytes, str | None]] = {
    "no JSON": (b"{", None),
    "a list": (b"[]", None),
    "an unknown field": (b'{"job_id": "torn", "alias": "support", "prompt": "x", "adapter": "mine"}', "torn"),
    "no text": (b'{"job_id": "torn", "alias": "support"}', "torn"),
    "a job id that is none": (b'{"job_id": "../torn", "alias": "support", "prompt": "x"}', None),
    "a job id that is no text": (b'{"job_id": 5, "alias": "support", "prompt": "x"}', None),
    "a job id twice": (b'{"job_id": "torn", "job_id": "torn", "alias": "support", "prompt": "x"}', None),
    "not UTF-8": (b'{"job_id": "\xff"}', None),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_job_goes_to_the_dead_letters_and_its_tenant_hears_what_to_mend(case: str) -> None:
    value, job_id = BROKEN[case]
    effect = await Desk().post(value)
    assert effect is not None
    letter, _ = effect.replies
    reply = reply_of(effect)
    assert (letter.topic, letter.value) == ("dlq", value)
    assert (reply.job_id, reply.reason, reply.retryable) == (job_id, RejectReason.INVALID_RECORD, False)
    assert len(reply.message) > 10
    assert effect.appends == ()


@pytest.mark.parametrize("content", [b"nonsense", JobCancelled(job_id="x", tenant="globex"), make_job()])
async def test_a_broken_cancellation_is_a_dead_letter_and_no_reply(content: Record | bytes) -> None:
    effect = await Desk().post(content, "cancel.acme")
    assert effect is not None
    assert [outgoing.topic for outgoing in effect.replies] == ["dlq"]
    assert effect.audit == ()
    assert effect.appends == ()
