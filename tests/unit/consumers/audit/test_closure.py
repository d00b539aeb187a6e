"""What a replay of the audit finds missing, doubled or contradictory."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from consumers.audit.cli import as_document, as_lines
from consumers.audit.closure import JOB_MEMORY_MS, Closure, Coverage, Entry, Evidence, Verdict
from schemas.audit import AuditRecord, ImpersonationGranted, WriterClosed, undigested
from schemas.digest import digest_of
from tests.audit_records import DIGEST, IDENTITY, admitted, finished, impersonated, started
from tests.factories import make_grant

GRANT = make_grant("acme", 0).impersonation
OTHER_BASE = IDENTITY.model_copy(update={"base": digest_of(b"other")})


def entries(*records: AuditRecord | None, writer: str = "w-1", start: int = 0, step_ms: int = 10) -> list[Entry]:
    """Records as one writer appends them, one after another."""
    numbers = count(start)
    return [
        Entry(
            offset=offset,
            timestamp_ms=offset * step_ms,
            key=DIGEST,
            record=record and record.numbered(writer, offset),
        )
        for offset, record in zip(numbers, records, strict=False)
    ]


def replayed(found: Iterable[Entry], start: int = 0, end: int | None = None) -> Evidence:
    told = list(found)
    last = told[-1].offset + 1 if told else start
    closure = Closure(Coverage(digest=DIGEST, partition=0, partitions=8, start=start, end=last if end is None else end))
    for entry in told:
        closure.add(entry)
    return closure.evidence()


def test_a_job_with_one_outcome_is_complete() -> None:
    evidence = replayed(entries(admitted(), started(), finished(), WriterClosed()))
    assert evidence.verdict is Verdict.COMPLETE
    assert (evidence.admitted, evidence.outcomes, evidence.open_writers) == (1, {"completed": 1}, ())


def test_repeated_appends_are_folded_and_change_nothing_but_their_count() -> None:
    evidence = replayed(entries(admitted(), admitted(), started(), started(), finished(), finished()))
    assert (evidence.verdict, evidence.repeated, len(evidence.events)) == (Verdict.COMPLETE, 3, 3)


def test_an_open_job_is_listed_with_its_age_and_leaves_the_replay_incomplete() -> None:
    evidence = replayed(entries(admitted(1), admitted(2), started(2), finished(2)))
    assert evidence.verdict is Verdict.INCOMPLETE
    assert [(job.job, job.offset, job.age_ms) for job in evidence.open_jobs] == [("acme/job-1", 0, 30)]


def test_two_outcomes_of_one_job_are_a_problem() -> None:
    evidence = replayed(entries(admitted(), started(), finished(metering=1), finished(metering=2)))
    assert evidence.problems == ("job acme/job-1: 2 outcomes",)


def test_identities_that_differ_are_a_problem() -> None:
    evidence = replayed(entries(admitted(), started(), finished(identity=OTHER_BASE)))
    assert evidence.problems == ("job acme/job-1: its records carry 2 different identities",)


def test_a_repetition_with_another_content_is_a_problem() -> None:
    evidence = replayed(entries(admitted(), admitted(identity=OTHER_BASE), started(), finished()))
    assert evidence.problems == ("offset 1 repeats offset 0 with another content",)


def test_an_id_admitted_twice_while_it_is_remembered_is_a_problem_and_later_is_none() -> None:
    twice = (admitted(ingress=1), started(), finished(metering=1), admitted(ingress=2), finished(metering=2))
    assert replayed(entries(*twice)).problems == ("job acme/job-1: admitted 2 times",)
    assert replayed(entries(*twice, step_ms=JOB_MEMORY_MS)).verdict is Verdict.COMPLETE


def test_an_outcome_without_admission_or_start_is_a_problem_unless_the_range_begins_later() -> None:
    evidence = replayed(entries(finished()))
    assert evidence.problems == (
        "job acme/job-1: has records, but was never admitted",
        "job acme/job-1: completed in an attempt that never started",
    )
    later = replayed(entries(finished(), start=7), start=7)
    assert (later.verdict, later.earlier) == (Verdict.COMPLETE, 1)


def test_a_record_of_another_digest_under_this_key_is_a_problem() -> None:
    foreign = IDENTITY.model_copy(update={"adapter": digest_of(b"foreign")})
    evidence = replayed(entries(admitted(identity=foreign)))
    assert evidence.problems == ("job acme/job-1: a record of another digest lies under this one",)


def test_missing_offsets_and_unreadable_records_are_problems() -> None:
    told = entries(admitted(), started(), finished(), None)
    assert replayed([told[0], *told[2:]], end=9).problems == (
        "offsets 1 to 1 are missing",
        "offset 2: writer w-1 numbered 2 where 1 was due",
        "offset 3 holds no audit record",
        "offsets 4 to 8 are missing",
        "job acme/job-1: completed in an attempt that never started",
    )


def test_a_job_in_the_tenants_name_tells_who_until_when_and_why_in_one_line() -> None:
    told = (impersonated(GRANT), admitted(impersonation=GRANT), started(), finished())
    evidence = replayed(entries(*told[:2], *told))
    assert (evidence.verdict, evidence.repeated) == (Verdict.COMPLETE, 2)
    line = as_lines(evidence)[2]
    assert line.split()[2:4] == ["Impersonated", "acme/job-1"]
    assert "=grant-0001 of 'eve' until 1970-01-01T00:01:00.000+00:00 because 'ticket 7'" in line


def test_a_line_moves_no_cursor_whatever_reason_was_given() -> None:
    evil = GRANT.model_copy(update={"reason": "\x1b[2Jnothing\nhere"})
    assert "because '\\x1b[2Jnothing\\nhere'" in as_lines(replayed(entries(impersonated(evil))))[2]


def test_an_admission_that_does_not_agree_with_who_acted_is_a_problem() -> None:
    other, differ = GRANT.model_copy(update={"admin": "mallory"}), (
        "job acme/job-1: its admission and the record of who acted in the tenant's name differ",
    )  # fmt: skip
    rest = (started(), finished())
    assert replayed(entries(admitted(impersonation=GRANT), *rest)).problems == differ
    assert replayed(entries(impersonated(GRANT), admitted(), *rest)).problems == differ
    assert replayed(entries(impersonated(other), admitted(impersonation=GRANT), *rest)).problems == differ
    later = replayed(entries(admitted(impersonation=GRANT), *rest, start=7), start=7)
    assert later.verdict is Verdict.COMPLETE


def test_a_grant_that_was_made_out_beside_the_digest_is_counted_and_told_of_no_job() -> None:
    granted, *rest = entries(ImpersonationGranted(impersonation=GRANT), admitted(), started(), finished())
    evidence = replayed([replace(granted, key=undigested("acme")), *rest])
    assert (evidence.verdict, evidence.read, len(evidence.events)) == (Verdict.COMPLETE, 4, 3)


def test_a_writer_that_writes_after_it_closed_is_a_problem() -> None:
    evidence = replayed(entries(WriterClosed(), admitted(), started(), finished()))
    assert evidence.problems[0] == "offset 1: writer w-1 wrote after it had closed"


@given(st.data())
def test_any_record_taken_out_of_a_writers_midst_shows(data: st.DataObject) -> None:
    jobs = data.draw(st.integers(1, 6))
    told = entries(*(kind(number) for number in range(jobs) for kind in (admitted, started, finished)), WriterClosed())
    lost = data.draw(st.integers(0, len(told) - 2))
    # As if it had never reached the broker: no offset is missing, but a number is.
    kept = [
        Entry(offset=offset, timestamp_ms=0, key=entry.key, record=entry.record)
        for offset, entry in enumerate(entry for entry in told if entry.offset != lost)
    ]
    assert replayed(kept).verdict is Verdict.INCOMPLETE
    assert replayed(told).verdict is Verdict.COMPLETE


def test_the_same_records_give_the_same_bytes_and_a_line_each() -> None:
    told = entries(admitted(), started(), finished())
    assert as_document(replayed(told)) == as_document(replayed(told))
    lines = as_lines(replayed(told))
    assert lines[2].split()[:4] == ["0", "1970-01-01T00:00:00.000+00:00", "Admitted", "acme/job-1"]
    assert "usage=2+0" in lines[4]
    assert lines[-1] == "COMPLETE"


def test_a_digest_without_records_says_so() -> None:
    evidence = replayed([])
    assert evidence.verdict is Verdict.EMPTY
    assert "no record of this digest" in as_lines(evidence)
