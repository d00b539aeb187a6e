"""What the log folds into, where order or time makes it hard."""

from infra.kafka.records import Incoming
from ledger.answers import LEASE_GRACE_MS, MEMORY_MS, Decision
from ledger.fold import LogFold
from ledger.rebuild import _apply, differences
from ledger.rows import Kind, Row
from schemas.audit import CancelRequested, ImpersonationGranted, Rejected, WriterClosed
from schemas.jobs import RejectReason
from schemas.record import Record
from tests.factories import make_grant
from tests.fakes_ledger import START_MS, at, make_admission, make_admitted, make_route, make_started, make_usage

NOW_US = START_MS * 1000


def fold(*records: Record, at_ms: int = START_MS) -> dict[str, Row]:
    made = LogFold()
    for record in records:
        made.apply(record, at_ms)
    return made.rows(NOW_US)


def rejected(reason: RejectReason, body_hash: str | None = make_admission().body_hash) -> Rejected:
    return Rejected(tenant="acme", job_id="job-1", body_hash=body_hash, ingress=at(), reason=reason)


def test_an_open_lease_is_an_admission_without_usage() -> None:
    ask = make_admission()
    assert fold(make_admitted(ask))["acme/job-1"].held
    assert not fold(make_admitted(ask), make_usage(ask))["acme/job-1"].held


def test_a_lease_whose_time_is_over_is_not_held_and_its_decision_stays() -> None:
    made = LogFold()
    ask = make_admission()
    made.apply(make_admitted(ask), START_MS)
    after_us = (ask.decision.expires_at_ms + ask.grace_ms) * 1000
    row = made.rows(after_us)["acme/job-1"]
    assert (row.held, row.ended, row.decision) == (False, False, ask.decision.encode().decode())


def test_rows_are_forgotten_when_redis_forgets_them() -> None:
    made = LogFold()
    made.apply(make_admitted(make_admission()), START_MS)
    made.apply(make_usage(make_admission()), START_MS + 1)
    assert made.rows((START_MS + MEMORY_MS - 1) * 1000)
    assert made.rows((START_MS + MEMORY_MS) * 1000) == {}


def test_a_second_life_of_a_job_id_forgets_the_first() -> None:
    first, second = make_admission(body="first"), make_admission(body="second")
    made = LogFold()
    made.apply(make_admitted(second, NOW_US), START_MS)
    made.apply(make_admitted(first, NOW_US - MEMORY_MS * 1000), START_MS - MEMORY_MS)
    made.apply(make_started(first, attempt=9), START_MS - MEMORY_MS + 1)
    made.apply(make_usage(first), START_MS - MEMORY_MS + 2)
    row = made.rows(NOW_US)["acme/job-1"]
    assert (row.body, row.attempt, row.ended, row.held) == (second.body_hash, 0, False, True)


def test_the_highest_started_attempt_and_its_place_are_kept() -> None:
    ask, request = make_admission(), at("requests.main")
    row = fold(make_admitted(ask), make_started(ask, 2, request, "7.1"), make_started(ask, 1, request))["acme/job-1"]
    assert (row.attempt, row.request, row.fence, row.running) == (2, str(request), "7.1", True)


def test_usage_without_an_admission_is_remembered_as_settled() -> None:
    ask = make_admission()
    assert fold(make_usage(ask))["acme/job-1"] == Row(kind=Kind.SETTLED, ingress=str(ask.ingress))


def test_only_a_refusal_that_the_ledger_remembers_makes_a_row() -> None:
    assert fold(rejected(RejectReason.UNKNOWN_ALIAS))["acme/job-1"].kind is Kind.REFUSED
    assert fold(rejected(RejectReason.JOB_ID_REUSED)) == {}
    assert fold(rejected(RejectReason.INVALID_RECORD, body_hash=None)) == {}
    cancelled = CancelRequested(tenant="acme", job_id="job-1", identity=None, ingress=at())
    assert fold(cancelled, rejected(RejectReason.CANCELLED))["acme/job-1"].kind is Kind.CANCELLED


def test_the_epoch_of_usage_counts_too_and_other_records_are_passed_over() -> None:
    made = LogFold()
    made.apply(make_usage(make_admission(), epoch=7), START_MS)
    made.apply(WriterClosed(), START_MS)
    assert made.epoch_max == 7


def test_what_no_fold_needs_is_passed_over_whatever_it_says_of_itself() -> None:
    claims = make_grant("acme", START_MS).impersonation.model_copy(update={"reason": '"type":"Admitted"'})
    granted = ImpersonationGranted(impersonation=claims).encode()
    later = granted.replace(b"ImpersonationGranted", b"OfALaterRelease")
    made = LogFold()
    for value in (granted, later, b"no record", None):
        read = Incoming(
            topic="audit", partition=0, offset=1, timestamp_ms=START_MS, key=None, value=value, headers=()
        )  # fmt: skip
        _apply(made, read)
    assert (made.rows(NOW_US), made.epoch_max) == ({}, 0)


def test_the_route_of_a_job_makes_the_row_that_its_admission_makes() -> None:
    ask = make_admission(grace_ms=LEASE_GRACE_MS)
    assert Row.of_route(make_route(ask)) == fold(make_admitted(ask))["acme/job-1"]
    assert Decision.of_route(make_route(ask)) == Decision.of_admitted(make_admitted(ask)) == ask.decision


def test_a_row_comes_back_from_what_redis_stores() -> None:
    ask, request = make_admission(), at("requests.main")
    row = fold(make_admitted(ask), make_started(ask, 2, request))["acme/job-1"]
    assert Row.of_stored(row.stored()) == row


def test_differences_name_the_job_and_the_field() -> None:
    rows = fold(make_admitted(make_admission()))
    assert differences(rows, rows, NOW_US) == []
    (missing,) = differences({}, rows, NOW_US)
    assert missing.startswith("job acme/job-1: admitted_us is None")
