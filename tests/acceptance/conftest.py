"""One whole stack for the acceptance tests: Kafka, Redis, router and settler; tests start the workers they need."""

from collections.abc import Iterator

import pytest

from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from tests.factories import IN_WORDS


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        home=tmp_path_factory.mktemp("whole"), router=True, settler=True, orderly=False, prompts=IN_WORDS
    )
    with running_stack(options) as stack:
        yield stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "whole" in getattr(item, "fixturenames", ()):
            item.add_marker("kafka")
            item.add_marker("slow")
