"""What each cell leaves for the printed table."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the matrix."""

    cell: str
    came_of_it: str
    proof: str


# Called last in a cell: the cell's name, what came of the attempt, and the record that proves it.
Note = Callable[[str, str, object], None]
ROWS = pytest.StashKey[list[Row]]()
