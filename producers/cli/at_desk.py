"""What the release and operator commands share: a desk at the running stack, and one way to print a table."""

import asyncio
import getpass
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from infra.clock import SystemClock
from infra.settings import StackFile, home_directory
from producers.release.desk import Desk, open_desk

Result = TypeVar("Result")
WIDTH_MAX = 1000


def running_stack() -> StackFile:
    """Raises NoStack."""
    return StackFile.load(home_directory())


def at_desk(work: Callable[[Desk], Awaitable[Result]]) -> Result:
    """Connect to the running stack, fold its registry, do the work. The login name is recorded as who did it."""
    stack = running_stack()

    async def run() -> Result:
        async with open_desk(stack, SystemClock(), getpass.getuser()) as desk:
            return await work(desk)

    return asyncio.run(run())


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table that never cuts a digest: it is as wide as its longest row, whatever the terminal."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*row)
    width = Console(width=WIDTH_MAX).measure(table).maximum
    Console(width=width, highlight=False).print(table)
