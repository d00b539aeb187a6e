"""The table of docs/outages.md, cell by cell: one outage of each service under load, and what was seen of it."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from infra.launch.plan import REPOSITORY, StackOptions
from infra.launch.stack import running_stack
from schemas.jobs import RejectReason
from schemas.replies import JobCompleted, JobFailed, JobRejected
from tests.factories import IN_WORDS
from tests.outage_scene import GONE, Seen, scene_on
from tests.outages import OUTAGES, WINDOW

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

PAGE = REPOSITORY / "docs/outages.md"
NOT_READY = RejectReason.NOT_READY
# A session of 8 s, a question each second, and a busy machine.
MISSED_S = 15.0
Look = Callable[[str], Seen]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """What was seen of an outage, which happens once, when the first of its cells asks."""
    options = StackOptions(home=tmp_path_factory.mktemp("outages"), settler=True, orderly=False, prompts=IN_WORDS)
    # One event loop for all: what its threads start dies with them.
    with running_stack(options) as stack, asyncio.Runner() as runner:
        opened = AsyncExitStack()
        scene = runner.run(opened.enter_async_context(scene_on(stack)))
        found: dict[str, Seen | Exception] = {}

        def look(service: str) -> Seen:
            if service not in found:
                try:
                    found[service] = runner.run(OUTAGES[service](scene))
                except (AssertionError, TimeoutError) as error:
                    found[service] = error
            outage = found[service]
            if isinstance(outage, Exception):
                raise outage
            return outage

        yield look
        runner.run(opened.aclose())


def test_store_what_runs(seen: Look) -> None:
    assert isinstance(seen("store").ran, JobCompleted)


def test_store_admission(seen: Look) -> None:
    assert len(seen("store").routed) == 2
    assert seen("store").router == seen("store").worker == "ready"


def test_store_what_is_told(seen: Look) -> None:
    (told,) = seen("store").told
    assert isinstance(told, JobFailed)
    assert (told.code, told.usage.completion_tokens) == ("artifact_unavailable", 0)


def test_store_return(seen: Look) -> None:
    assert seen("store").in_order


def test_redis_gone_what_runs(seen: Look) -> None:
    assert isinstance(seen("redis gone").ran, JobCompleted)


def test_redis_gone_admission(seen: Look) -> None:
    assert seen("redis gone").routed == set()


def test_redis_gone_what_is_told(seen: Look) -> None:
    (told,), (notice,) = seen("redis gone").told, seen("redis gone").notices
    assert isinstance(told, JobRejected)
    assert (told.reason, told.retryable, notice.reason) == (NOT_READY, True, NOT_READY)
    assert told.retry_after_ms


def test_redis_gone_return(seen: Look) -> None:
    assert seen("redis gone").in_order


def test_redis_silent_what_runs(seen: Look) -> None:
    assert isinstance(seen("redis silent").ran, JobCompleted)


def test_redis_silent_admission(seen: Look) -> None:
    assert seen("redis silent").routed == set()


def test_redis_silent_what_is_told(seen: Look) -> None:
    assert [notice.reason for notice in seen("redis silent").notices] == [NOT_READY, NOT_READY]
    assert seen("redis silent").told == [], "its place may be taken, and then its id is"


def test_redis_silent_return(seen: Look) -> None:
    assert seen("redis silent").in_order


def test_kafka_what_runs(seen: Look) -> None:
    assert isinstance(seen("kafka").ran, JobCompleted)


def test_kafka_admission(seen: Look) -> None:
    assert "stale" in seen("kafka").router
    assert "stale" in seen("kafka").worker


def test_kafka_what_is_told(seen: Look) -> None:
    (told,) = seen("kafka").told
    assert not seen("kafka").taken
    assert isinstance(told, JobCompleted) or (isinstance(told, JobRejected) and told.retryable)


def test_kafka_return(seen: Look) -> None:
    assert seen("kafka").in_order


def test_kafka_killed_what_runs(seen: Look) -> None:
    assert isinstance(seen("kafka killed").ran, JobCompleted)


def test_kafka_killed_admission(seen: Look) -> None:
    assert "stale" in seen("kafka killed").router or seen("kafka killed").router == GONE
    assert "stale" in seen("kafka killed").worker or seen("kafka killed").worker == GONE


def test_kafka_killed_what_is_told(seen: Look) -> None:
    assert not seen("kafka killed").taken
    told = seen("kafka killed").told
    assert len(told) == WINDOW + 1
    assert all(
        isinstance(reply, JobCompleted) or (isinstance(reply, JobRejected) and reply.retryable) for reply in told
    )


def test_kafka_killed_return(seen: Look) -> None:
    assert seen("kafka killed").in_order
    assert set(seen("kafka killed").codes) <= {1}, "who ended said why, and was started again"


def test_worker_killed_what_runs(seen: Look) -> None:
    ran = seen("worker killed").ran
    assert isinstance(ran, JobCompleted)
    assert ran.receipt.attempt == 2


def test_worker_killed_admission(seen: Look) -> None:
    assert 0 < len(seen("worker killed").routed) < WINDOW, "the job that ran holds a place of the window"
    assert seen("worker killed").took_s <= MISSED_S


def test_worker_killed_what_is_told(seen: Look) -> None:
    *told, last = [reply for reply in seen("worker killed").told if isinstance(reply, JobRejected)]
    assert {(reply.reason, reply.retryable) for reply in told} == {(RejectReason.CAPACITY, True)}
    assert (last.reason, last.retryable) == (NOT_READY, True)
    assert [notice.reason for notice in seen("worker killed").notices] == [NOT_READY]


def test_worker_killed_return(seen: Look) -> None:
    assert seen("worker killed").in_order


def test_worker_stopped_what_runs(seen: Look) -> None:
    ran = seen("worker stopped").ran
    assert isinstance(ran, JobCompleted)
    assert ran.receipt.attempt == 1


def test_worker_stopped_admission(seen: Look) -> None:
    assert seen("worker stopped").routed == set()


def test_worker_stopped_what_is_told(seen: Look) -> None:
    (told,), (notice,) = seen("worker stopped").told, seen("worker stopped").notices
    assert isinstance(told, JobRejected)
    assert (told.reason, told.retryable, notice.reason) == (NOT_READY, True, NOT_READY)


def test_worker_stopped_return(seen: Look) -> None:
    assert seen("worker stopped").in_order


def test_registry_what_runs(seen: Look) -> None:
    assert seen("registry").codes[1] == 1


def test_registry_admission(seen: Look) -> None:
    assert seen("registry").codes[0] == 1
    assert seen("registry").routed == set()


def test_registry_what_is_told(seen: Look) -> None:
    assert "tenants cannot be read at offset" in seen("registry").router


def test_registry_return(seen: Look) -> None:
    assert seen("registry").codes[2] == 1, "a restart alone opens nothing"


def test_every_cell_of_the_page_has_its_test() -> None:
    rows = [line.split("|")[2:6] for line in PAGE.read_text().splitlines() if line.startswith("| **")]
    cells = [re.findall(r"`(test_\w+)`", cell) for row in rows for cell in row]
    here = re.findall(r"^def (test_\w+)\(seen", Path(__file__).read_text(), re.M)
    assert [names[0] for names in cells] == here
