"""`switchyard pool`: set, list."""

import click

from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.release import platform
from producers.release.desk import Desk
from schemas.topics import REQUESTS


@click.group()
def pool() -> None:
    """Pools of workers: set, list."""


@pool.command("set")
@click.argument("name")
@click.option("--base", required=True, help="The base it serves: a name or a digest.")
@click.option("--rank-max", default=8, show_default=True, type=click.IntRange(1, 512), help="Its largest adapter rank.")
@click.option("--context-max", default=1024, show_default=True, type=click.IntRange(16), help="Tokens of a job in all.")
@click.option("--partitions", default=REQUESTS.partitions, show_default=True, type=click.IntRange(1, 256))
def set_(name: str, base: str, rank_max: int, context_max: int, partitions: int) -> None:
    """Make the pool NAME, or change what it serves."""
    admin = running_stack().kafka("admin")
    configured = at_desk(lambda desk: platform.set_pool(desk, admin, name, base, rank_max, context_max, partitions))
    click.echo(f"{configured.pool} serves {configured.base}")


@pool.command("list")
def list_() -> None:
    """List pools with what they serve."""
    print_table(("pool", "base", "rank max", "context max", "partitions"), at_desk(_rows))


async def _rows(desk: Desk) -> list[tuple[str, ...]]:
    return [
        (name, found.base, str(found.rank_max), str(found.context_max), str(found.partitions))
        for name, found in desk.registry.pools.items()
    ]
