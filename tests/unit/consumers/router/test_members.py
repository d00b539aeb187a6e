"""A worker is there while the last answer names it, and that answer is young."""

from consumers.router.members import ANSWER_COUNTS_S, Members
from schemas.adapters import WorkerReady
from tests.desk import StillClock
from tests.factories import ready

BASE = "sha256:" + "1" * 64


class MovingClock(StillClock):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def worker(name: str = "worker-1", pool: str = "main") -> WorkerReady:
    _, _, record = ready(BASE, name, pool)
    assert isinstance(record, WorkerReady)
    return record


def test_nobody_is_there_before_kafka_said_so() -> None:
    assert not Members(MovingClock()).present(worker())


def test_who_is_named_is_there_in_that_pool_only() -> None:
    clock = MovingClock()
    members = Members(clock)
    members.heard("main", frozenset({"worker-1"}), clock.now_s)
    assert members.present(worker())
    assert not members.present(worker("worker-2"))
    assert not members.present(worker(pool="other"))


def test_who_left_the_group_is_gone_with_the_next_answer() -> None:
    clock = MovingClock()
    members = Members(clock)
    members.heard("main", frozenset({"worker-1"}), clock.now_s)
    members.heard("main", frozenset(), clock.now_s + 1)
    assert not members.present(worker())


def test_an_answer_counts_for_a_while_and_then_names_nobody() -> None:
    clock = MovingClock()
    members = Members(clock)
    members.heard("main", frozenset({"worker-1"}), clock.now_s)
    clock.now_s += ANSWER_COUNTS_S
    assert members.present(worker())
    clock.now_s += 0.1
    assert not members.present(worker())
