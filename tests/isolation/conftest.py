"""One house for all cells, and the notes each cell leaves for the printed table."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from tests.factories import IN_WORDS
from tests.isolation.house import House, house_on
from tests.isolation.notes import ROWS, Note, Row


@pytest.fixture(scope="package")
def matrix_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        home=tmp_path_factory.mktemp("matrix"), router=True, settler=True, orderly=False, prompts=IN_WORDS
    )
    with running_stack(options) as stack:
        yield stack


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def house(matrix_stack: Stack) -> AsyncIterator[House]:
    async with house_on(matrix_stack) as house:
        yield house


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Writes a cell's line of the table."""
    rows = request.config.stash.setdefault(ROWS, [])

    def write(cell: str, came_of_it: str, proof: object) -> None:
        rows.append(Row(cell=cell, came_of_it=came_of_it, proof=str(proof)))

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "house" in getattr(item, "fixturenames", ()):
            item.add_marker("kafka")
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(180))
