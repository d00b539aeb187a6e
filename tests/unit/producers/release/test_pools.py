"""A pool's rows and window are those of the workers that announced themselves and are in its group."""

import pytest

from infra.kafka.clients import KafkaTimeout
from infra.kafka.members import GroupMembers
from producers.release.pools import Standing, members_of, pool_now
from tests.desk import KAFKA
from tests.factories import Entry, make_registry, pool_of, ready

BASE, OTHER = (f"sha256:{number:064x}" for number in (1, 2))
POOL = pool_of(BASE, partitions=4)
HERE = ready(BASE, "here", rows=4, partitions=(0, 1))
AWAY = ready(BASE, "away", rows=8, partitions=(2, 3))


def standings(entries: list[Entry], members: frozenset[str] | str) -> dict[str, Standing]:
    return {
        worker.ready.worker: worker.standing for worker in pool_now(make_registry(entries), "main", members).workers
    }


def test_a_worker_that_is_not_in_the_group_counts_for_nothing() -> None:
    now = pool_now(make_registry([POOL, HERE, AWAY]), "main", frozenset({"here", "a stranger"}))
    assert (now.rows, now.window, now.problem) == (4, 2 * (2 * 4), None)
    assert [(w.ready.worker, w.partitions, w.standing) for w in now.workers] == [
        ("away", (2, 3), Standing.ABSENT),
        ("here", (0, 1), Standing.READY),
    ]


def test_where_membership_is_not_known_nobody_is_said_to_be_there_or_away() -> None:
    now = pool_now(make_registry([POOL, HERE, AWAY]), "main", "Kafka did not answer")
    assert (now.rows, now.window, now.problem) == (0, 0, "Kafka did not answer")
    assert {worker.standing for worker in now.workers} == {Standing.UNKNOWN}


@pytest.mark.parametrize(
    ("entries", "standing"),
    [
        ([POOL, ready(OTHER, "here")], Standing.UNSUITED),
        ([POOL, HERE, ready(BASE, "next")], Standing.WITHOUT_PARTITIONS),
        ([POOL, ready(BASE, "here", rows=0)], Standing.WITHOUT_ROWS),
        ([POOL, ready(BASE, "here", partitions=())], Standing.WITHOUT_PARTITIONS),
    ],
)
@pytest.mark.parametrize("members", [frozenset({"here", "next"}), "unknown"])
def test_a_member_that_routers_pass_over_is_listed_with_the_reason(
    entries: list[Entry], standing: Standing, members: frozenset[str] | str
) -> None:
    now = pool_now(make_registry(entries), "main", members)
    assert standings(entries, members)["here"] is standing
    assert "here" not in {worker.ready.worker for worker in now.workers if worker.standing is Standing.READY}


async def test_a_question_that_kafka_does_not_answer_leaves_the_other_pools_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connected(_: GroupMembers) -> None: ...

    async def answer(_: GroupMembers, group: str) -> frozenset[str]:
        if group.endswith("slow"):
            raise KafkaTimeout("Kafka did not answer within 2 s")
        return frozenset({"here"})

    monkeypatch.setattr(GroupMembers, "start", connected)
    monkeypatch.setattr(GroupMembers, "of", answer)
    assert await members_of(KAFKA, ["main", "slow"]) == {
        "main": frozenset({"here"}),
        "slow": "Kafka did not answer within 2 s",
    }
