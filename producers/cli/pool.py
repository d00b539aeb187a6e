"""`switchyard pool`: set, list."""

import click

from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.release import platform
from producers.release.desk import Desk
from schemas.ids import parse_tenant
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
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="Serve only this tenant, and it only here. Repeatable.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="BUILD",
    help="Only workers of this engine build count as ready, such as 'fake 1'. Repeatable. Default: any build.",
)
@click.option("--reserve", multiple=True, metavar="TENANT=PERCENT", help="Hold a part of the places for one tenant.")
def set_(
    name: str,
    base: str,
    rank_max: int,
    context_max: int,
    partitions: int,
    tenants: tuple[str, ...],
    engines: tuple[str, ...],
    reserve: tuple[str, ...],
) -> None:
    """Make the pool NAME, or change what it serves and whom."""
    admin = running_stack().kafka("admin")
    wanted = platform.PoolShape(
        rank_max=rank_max,
        context_max=context_max,
        partitions=partitions,
        tenants=tuple(parse_tenant(tenant) for tenant in tenants) or None,
        reserved=dict(_reserved(part) for part in reserve),
        engines=engines or None,
    )
    configured = at_desk(lambda desk: platform.set_pool(desk, admin, name, base, wanted))
    click.echo(f"{configured.pool} serves {configured.base}")


def _reserved(part: str) -> tuple[str, int]:
    tenant, _, percent = part.partition("=")
    if not percent.isdecimal() or not 1 <= int(percent) <= 100:
        raise click.BadParameter(f"{part!r} is not TENANT=PERCENT, such as acme=25", param_hint="--reserve")
    return parse_tenant(tenant), int(percent)


@pool.command("list")
def list_() -> None:
    """List pools with what they serve."""
    columns = ("pool", "base", "rank max", "context max", "partitions", "only for", "reserved", "engines")
    print_table(columns, at_desk(_rows))


async def _rows(desk: Desk) -> list[tuple[str, ...]]:
    return [
        (
            name,
            found.base,
            str(found.rank_max),
            str(found.context_max),
            str(found.partitions),
            ", ".join(found.tenants or ()),
            ", ".join(f"{tenant} {percent} %" for tenant, percent in found.reserved.items()),
            ", ".join(found.engines or ("any",)),
        )
        for name, found in desk.registry.pools.items()
    ]
