"""`switchyard tenant`: add, remove, list."""

import getpass

import click

from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.release import platform
from producers.release.desk import Desk
from schemas.ids import parse_tenant
from schemas.jobs import DEADLINE_MS_MAX
from schemas.tenants import TenantConfigured

DEADLINE = click.IntRange(1, DEADLINE_MS_MAX)


@click.group()
def tenant() -> None:
    """Tenants: add, remove, list."""


@tenant.command()
@click.argument("name")
@click.option(
    "--concurrency-max", default=64, show_default=True, type=click.IntRange(1, 1_000_000), help="Jobs at once."
)
@click.option("--tokens-max", default=4096, show_default=True, type=click.IntRange(1), help="Output tokens of one job.")
@click.option("--interactive-deadline-ms", default=120_000, show_default=True, type=DEADLINE)
@click.option("--batch-deadline-ms", default=DEADLINE_MS_MAX, show_default=True, type=DEADLINE)
@click.option("--show-password", is_flag=True, help="Print the Kafka password; it is kept in the stack's file anyway.")
def add(
    name: str,
    concurrency_max: int,
    tokens_max: int,
    interactive_deadline_ms: int,
    batch_deadline_ms: int,
    show_password: bool,
) -> None:
    """Make the tenant NAME with its topics, Kafka user and rights, or change its limits."""
    stack = running_stack()
    configured = TenantConfigured(
        tenant=parse_tenant(name),
        concurrency_max=concurrency_max,
        tokens_max=tokens_max,
        interactive_deadline_ms=interactive_deadline_ms,
        batch_deadline_ms=batch_deadline_ms,
        configured_by=getpass.getuser(),
    )
    changed = at_desk(lambda desk: platform.add_tenant(desk, stack, configured))
    click.echo(f"tenant {name} at {changed.bootstrap}")
    if show_password:
        click.echo(changed.kafka(name).password)


@tenant.command()
@click.argument("name")
def remove(name: str) -> None:
    """Stop serving the tenant NAME and revoke its adapters. Its topics stay as the record."""
    revoked = at_desk(lambda desk: platform.remove_tenant(desk, name))
    click.echo(f"removed {name}" + "".join(f"\nrevoked {digest}" for digest in revoked))


@tenant.command("list")
def list_() -> None:
    """List tenants with their limits."""
    print_table(("tenant", "state", "jobs at once", "tokens max"), at_desk(_rows))


async def _rows(desk: Desk) -> list[tuple[str, ...]]:
    return [
        (name, found.state.value, str(found.concurrency_max), str(found.tokens_max))
        for name, found in desk.registry.tenants.items()
    ]
