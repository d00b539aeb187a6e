"""`python -m tests.isolation`: run every cell of the matrix on a stack of its own and print what came of each."""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.isolation.notes import ROWS, Row

WIDTH = 190


class Printer:
    """Takes the notes of the cells, and the names of those that failed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid.rpartition('::')[2]}: failed ({report.when})")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.rows = session.config.stash.get(ROWS, [])

    def table(self) -> Table:
        table = Table(title="isolation matrix", show_lines=True)
        for heading in ("what one tenant tries", "what comes of it", "the record that proves it"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            table.add_row(row.cell, row.came_of_it, row.proof)
        return table


def main() -> int:
    printer = Printer()
    print("a stack with two tenants starts, and every cell is tried", flush=True)
    code = pytest.main([str(Path(__file__).parent), "-q", "--no-header", "--no-summary"], [printer])
    Console(width=WIDTH).print(printer.table())
    for failure in printer.failed:
        print(failure)
    print(f"{len(printer.rows)} cells hold, {len(printer.failed)} do not")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
