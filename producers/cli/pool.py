"""`switchyard pool`: set, list."""

import click

from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.release import platform
from producers.release.desk import Desk
from producers.release.pools import PoolNow, WorkerNow, members_of, pool_now
from schemas.adapters import PoolConfigured
from schemas.ids import parse_tenant
from schemas.topics import REQUESTS, Role

POOL_COLUMNS = (
    "pool", "base", "rank max", "context max", "partitions", "rows", "window", "only for", "reserved", "engines",
)  # fmt: skip
WORKER_COLUMNS = ("worker", "pool", "engine", "slots", "rows", "partitions", "state")


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
    """List pools with what they serve, and their workers.

    Rows and window count what routers count: workers that Kafka says are in their pool's consumer group.
    """
    operator = running_stack().kafka(Role.OPERATOR)

    async def look(desk: Desk) -> tuple[list[PoolConfigured], dict[str, PoolNow]]:
        announced = {worker.pool for worker in desk.registry.workers.values()}
        members = await members_of(operator, announced & desk.registry.pools.keys())
        now = {name: pool_now(desk.registry, name, members.get(name, frozenset())) for name in desk.registry.pools}
        return list(desk.registry.pools.values()), now

    pools, now = at_desk(look)
    print_table(POOL_COLUMNS, [_pool_row(found, now[found.pool]) for found in pools])
    workers = [_worker_row(worker) for found in pools for worker in now[found.pool].workers]
    if workers:
        click.echo()
        print_table(WORKER_COLUMNS, workers)
    for name, found in now.items():
        if found.problem is not None:
            click.echo(f"who is in the group of pool {name} is unknown: {found.problem}", err=True)


def _pool_row(pool: PoolConfigured, now: PoolNow) -> tuple[str, ...]:
    counted = (str(now.rows), str(now.window)) if now.problem is None else ("unknown", "unknown")
    return (
        pool.pool,
        pool.base,
        str(pool.rank_max),
        str(pool.context_max),
        str(pool.partitions),
        *counted,
        ", ".join(pool.tenants or ()),
        ", ".join(f"{tenant} {percent} %" for tenant, percent in pool.reserved.items()),
        ", ".join(pool.engines or ("any",)),
    )


def _worker_row(worker: WorkerNow) -> tuple[str, ...]:
    ready = worker.ready
    partitions = ", ".join(map(str, worker.partitions)) or "none"
    return ready.worker, ready.pool, ready.engine, str(ready.slots), str(ready.rows), partitions, worker.standing
