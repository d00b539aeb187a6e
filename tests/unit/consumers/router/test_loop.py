"""What stays and what goes when some of a lane's work must wait, and in which order one job id is answered."""

from aiokafka import TopicPartition

from consumers.router.effects import NOTHING, Effect
from consumers.router.intake import Unreadable, Work, read
from consumers.router.loop import LANE_RECORDS_MAX, RETRY_S_MAX, Line, Passed, _rounds, _settled
from infra.kafka.lane import Lane
from infra.kafka.records import Incoming, Outgoing
from schemas.jobs import RejectReason
from tests.factories import make_job

REPLY = Effect(replies=(Outgoing(topic="replies.acme", key=None, value=b""),))
ROUTE = Effect(appends=(Outgoing(topic="requests.main", key=None, value=b""),))


def make_work(offset: int, job_id: str | None = None) -> Work:
    record = Incoming(
        topic="jobs.acme", partition=0, offset=offset, timestamp_ms=0, key=None, value=None, headers=()
    )  # fmt: skip
    return Unreadable(
        record=record,
        tenant="acme",
        reason=RejectReason.INVALID_RECORD,
        detail="",
        job_id=job_id or f"job-{offset}",
        answered=True,
    )


def make_line(committed: int, following: int, topic: str = "batch.acme") -> Line:
    lane = Lane.__new__(Lane)
    lane.partition = TopicPartition(topic, 0)
    lane.lost, lane.committed, lane.next = False, committed, following
    return Line(lane=lane)


def settled(*found: Effect | None) -> tuple[list[Effect], list[int]]:
    replying, left = _settled([make_work(offset) for offset in range(len(found))], dict(enumerate(found)))
    return replying, [work.record.offset for work in left]


def test_answered_work_goes() -> None:
    assert settled(REPLY, ROUTE, NOTHING, REPLY) == ([REPLY, ROUTE, NOTHING, REPLY], [])


def test_a_reply_behind_a_job_that_waits_is_made_anew_and_a_route_is_not() -> None:
    assert settled(REPLY, None, ROUTE, REPLY, NOTHING, None) == ([REPLY, ROUTE, NOTHING], [1, 3, 5])


def test_records_of_one_job_id_are_answered_one_after_another() -> None:
    works = [make_work(offset, job_id) for offset, job_id in enumerate(["a", "b", "a", "c", "a", "b"])]
    assert _rounds(works) == [[0, 1, 3], [2, 5], [4]]


def test_a_line_commits_up_to_what_is_left() -> None:
    line = make_line(committed=3, following=9)
    assert line.place == 9
    assert line.has_work
    line.works = [make_work(5), make_work(7)]
    assert line.place == 5
    line.works, line.lane.committed = [], 9
    assert not line.has_work


def test_behind_an_interactive_job_that_waits_others_are_read_up_to_a_bound() -> None:
    for topic, most in (("jobs.acme", LANE_RECORDS_MAX), ("batch.acme", 1), ("cancel.acme", 1)):
        line = make_line(0, 9, topic)
        line.works = [make_work(offset) for offset in range(most - 1)]
        assert not line.full
        line.works.append(make_work(most))
        assert line.full


def make_jobs(*aliases: str, job_id: str | None = None) -> list[Work]:
    """Jobs of one batch topic, in the order of their offsets."""
    return [
        read(
            Incoming(
                topic="batch.acme", partition=0, offset=offset, timestamp_ms=0, key=None,
                value=make_job(job_id, alias=alias).encode(), headers=(),
            ),
            in_doubt=False,
        )
        for offset, alias in enumerate(aliases)
    ]  # fmt: skip


def offsets(works: list[Work]) -> list[int]:
    return [work.record.offset for work in works]


def test_an_alias_that_waits_is_asked_for_with_one_job_and_then_with_twice_as_many() -> None:
    line = make_line(0, 9)
    line.works = make_jobs(*"a" * 9)
    assert offsets(line.part(Passed())) == list(range(9))
    line.widen(line.works, {"a"})
    sizes = []
    for _ in range(4):
        asked = line.part(Passed())
        sizes.append(len(asked))
        line.widen(asked, set())
    assert sizes == [1, 2, 4, 8]


def test_a_job_that_waits_holds_up_its_own_alias_and_no_other() -> None:
    line = make_line(0, 9)
    line.works = make_jobs("a", "b", "a", "b", "c")
    assert offsets(line.part(Passed(aliases={"a"}))) == [1, 3, 4]
    assert line.part(Passed(aliases={"a", "b", "c"})) == []
    assert offsets(line.part(Passed(offsets={1}))) == [0, 2, 3, 4]


def test_nothing_overtakes_an_earlier_record_of_its_job_id() -> None:
    line = make_line(0, 9)
    line.works = make_jobs("a", "b", "c", job_id="same")
    assert line.part(Passed(aliases={"a"})) == []
    line.works = [*make_jobs("a"), make_work(1)]
    assert line.part(Passed(aliases={"a"})) == []


def test_a_lane_that_waits_asks_again_later_and_later() -> None:
    line = make_line(0, 1)
    for _ in range(10):
        line.waits(now=100.0)
    assert line.retry_at == 100.0 + RETRY_S_MAX
    line.waits_no_more()
    assert line.retry_at == 0.0
