"""`switchyard ledger`: see what is held, and make the ledger anew from the log."""

import asyncio

import click
from rich.console import Console
from rich.table import Table

from infra.redis import connect
from infra.settings import StackFile, home_directory
from ledger import rebuild as books
from ledger.answers import Status
from ledger.store import Ledger
from schemas.topics import Role


@click.group()
def ledger() -> None:
    """The ledger: leases, counts and the memory of decisions."""


@ledger.command()
@click.option("--check", is_flag=True, help="Change nothing: compare the ledger with the log, while nothing moves.")
def rebuild(check: bool) -> None:
    """Make the ledger anew from the log, and open it."""
    stack = StackFile.load(home_directory())
    if check:
        found = asyncio.run(_check(stack))
        for sentence in found:
            click.echo(sentence)
        click.echo("the ledger and the log differ" if found else "the ledger is what the log says")
        raise SystemExit(1 if found else 0)
    done = asyncio.run(_rebuild(stack))
    click.echo(f"ledger open: epoch {done.epoch}, {done.leases} leases, {done.rows} jobs from {done.records} records")


@ledger.command()
def status() -> None:
    """Show whether the ledger is open, and what is held."""
    found = asyncio.run(_status(StackFile.load(home_directory())))
    table = Table(title=f"ledger {'open' if found.open else 'closed'}, epoch {found.epoch}, {found.leases} leases")
    for heading in ("held by", "name", "leases"):
        table.add_column(heading)
    for kind, counts in (("tenant", found.tenants), ("window", found.windows), ("adapter", found.references)):
        for name, count in sorted(counts.items()):
            table.add_row(kind, name, str(count))
    spent = Table(title="used or reserved")
    for heading in ("tenant", "tokens of this minute", "tokens of this day", "fairness counter"):
        spent.add_column(heading)
    for name, sums in sorted(found.spent.items()):
        spent.add_row(name, str(sums.minute), str(sums.day), str(sums.counter))
    console = Console()
    console.print(table)
    console.print(spent)


async def _rebuild(stack: StackFile) -> books.Rebuilt:
    redis = connect(stack.redis("admin"))
    try:
        return await books.rebuild(stack.kafka(Role.OPERATOR), redis)
    finally:
        await redis.aclose()


async def _check(stack: StackFile) -> list[str]:
    redis = connect(stack.redis("admin"))
    try:
        return await books.check(stack.kafka(Role.OPERATOR), redis)
    finally:
        await redis.aclose()


async def _status(stack: StackFile) -> Status:
    redis = connect(stack.redis("admin"))
    try:
        return await Ledger(redis).status()
    finally:
        await redis.aclose()
