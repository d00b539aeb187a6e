"""What a reader of a running job is given, whatever order and number its chunks arrive in."""

from hypothesis import given
from hypothesis import strategies as st

from producers.job import Verdict, verdict
from producers.preview import TEXT_CHARACTERS_MAX, Event, Preview, Reset, Token, Waiting
from schemas.jobs import RejectReason
from schemas.record import Coordinates
from schemas.replies import FinalReply, JobRejected, TokensGenerated

OURS = Coordinates(topic="jobs.acme", partition=0, offset=7)
OTHER = Coordinates(topic="jobs.acme", partition=0, offset=3)


def chunk(text: str, seq: int, attempt: int = 1) -> TokensGenerated:
    return TokensGenerated(job_id="j", attempt=attempt, seq=seq, text=text, tokens=1)


def refusal(reason: RejectReason, place: Coordinates, *, retryable: bool = False) -> FinalReply:
    return JobRejected(
        tenant="acme", job_id="j", ingress=place, reason=reason, message="no", retryable=retryable, retry_after_ms=1
    )


def shown(events: list[Event]) -> str:
    """The text that a reader holds in the end."""
    text = ""
    for event in events:
        assert not isinstance(event, Waiting)
        text = "" if isinstance(event, Reset) else text + event.text
    return text


@given(
    chunks=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.booleans()), max_size=30),
    final=st.text(max_size=8),
)
def test_a_reader_ends_with_the_final_text_whatever_arrived_before(
    chunks: list[tuple[int, int, bool]], final: str
) -> None:
    preview = Preview()
    events: list[Event] = []
    for attempt, seq, reads in chunks:
        preview.take(chunk("abcde"[seq], seq, attempt))
        if reads:
            events.extend(preview.drain())
    preview.finish(final, 3)
    events.extend(preview.drain())
    assert shown(events) == final


def test_attempts_given_to_a_reader_never_fall() -> None:
    preview = Preview()
    preview.take(chunk("a", 0, 2))
    preview.take(chunk("zombie", 0, 1))
    first = preview.drain()
    preview.take(chunk("b", 0, 3))
    assert (*first, *preview.drain()) == (Token("a", 2), Reset(3), Token("b", 3))


def test_an_attempt_nobody_was_given_a_piece_of_needs_no_reset() -> None:
    preview = Preview()
    preview.take(chunk("a", 0, 1))
    preview.take(chunk("b", 0, 2))
    assert preview.drain() == (Token("b", 2),)


def test_a_preview_is_bounded_and_the_final_text_goes_on_where_it_stopped() -> None:
    preview = Preview()
    preview.take(chunk("x" * TEXT_CHARACTERS_MAX, 0))
    preview.take(chunk("y", 1))
    assert len(shown(list(preview.drain()))) == TEXT_CHARACTERS_MAX
    preview.finish("x" * TEXT_CHARACTERS_MAX + "y", 1)
    assert preview.drain() == (Token("y", 1),)


def test_a_lasting_refusal_of_an_earlier_record_answers_this_one_too() -> None:
    assert verdict(refusal(RejectReason.UNKNOWN_ALIAS, OTHER), OURS) is Verdict.FINAL
    assert verdict(refusal(RejectReason.UNKNOWN_ALIAS, OURS), None) is Verdict.FINAL


def test_what_concerns_one_record_answers_that_record_alone() -> None:
    for reason in (RejectReason.JOB_ID_REUSED, RejectReason.INVALID_RECORD, RejectReason.TENANT_MISMATCH):
        assert verdict(refusal(reason, OTHER), OURS) is Verdict.NOT_OURS
        assert verdict(refusal(reason, OURS), OURS) is Verdict.FINAL


def test_a_retryable_refusal_asks_for_another_try_of_its_own_record_only() -> None:
    assert verdict(refusal(RejectReason.CAPACITY, OURS, retryable=True), OURS) is Verdict.TRY_AGAIN
    assert verdict(refusal(RejectReason.CAPACITY, OTHER, retryable=True), OURS) is Verdict.NOT_OURS
    assert verdict(refusal(RejectReason.CAPACITY, OURS, retryable=True), None) is Verdict.NOT_OURS


def test_what_a_job_waits_for_is_said_once_before_its_text() -> None:
    preview = Preview()
    preview.wait("no place is free")
    preview.wait("no place is free")
    assert preview.drain() == (Waiting("no place is free"),)
    preview.wait("no worker is ready")
    preview.finish("text", 1)
    assert preview.drain() == (Waiting("no worker is ready"), Token("text", 1))
