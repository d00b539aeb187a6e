"""`switchyard tenant`: add, set, grant, withdraw, show, rotate, remove, list."""

import getpass
from datetime import UTC, datetime
from pathlib import Path

import click

from infra.settings import StackFile
from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.cli.impersonate import impersonate
from producers.release import platform
from producers.release.desk import Desk
from producers.release.tenant_file import changes_in
from schemas.ids import parse_alias, parse_tenant
from schemas.jobs import DEADLINE_MS_MAX, JobClass
from schemas.tenants import AliasGranted, AliasWithdrawn, TenantConfigured
from schemas.topics import TENANTS

DEADLINE = click.IntRange(1, DEADLINE_MS_MAX)
TIME = click.DateTime()


@click.group()
def tenant() -> None:
    """Tenants: what each may use."""


tenant.add_command(impersonate)


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


@tenant.command("set")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
def set_(file: Path, dry_run: bool) -> None:
    """Make tenants what FILE says: limits, shares, floors, grants and Kafka client quotas.

    FILE is TOML with one table per tenant and one [TENANT.grants.ALIAS] per alias. What it leaves out stays as it is;
    `ALIAS = false` under [TENANT.grants] withdraws a grant.
    """
    stack, text = running_stack(), file.read_text()
    for line in at_desk(lambda desk: _set(desk, stack, text, dry_run)):
        click.echo(line)


async def _set(desk: Desk, stack: StackFile, text: str, dry_run: bool) -> list[str]:
    changes = changes_in(text, desk.registry.tenants, desk.registry.grants, desk.actor)
    lines = [line for change in changes for line in change.sentences]
    for change in changes:
        if change.sentences and not dry_run:
            await platform.apply_change(desk, stack, change)
    return lines or ["nothing changes"]


@tenant.command()
@click.argument("name")
@click.argument("alias")
@click.option("--entitlement", required=True, help="What was sold or agreed: a product, a contract, a ticket.")
@click.option("--class", "classes", multiple=True, type=click.Choice([c.value for c in JobClass]), help="Repeatable.")
@click.option("--tokens-max", type=click.IntRange(1), help="Output tokens of one job under this alias.")
@click.option("--from", "start", type=TIME, help="Not before this time (UTC).")
@click.option("--until", "end", type=TIME, help="Not after this time (UTC).")
def grant(
    name: str,
    alias: str,
    entitlement: str,
    classes: tuple[str, ...],
    tokens_max: int | None,
    start: datetime | None,
    end: datetime | None,
) -> None:
    """Let the tenant NAME use its ALIAS, from the next job on. A later grant replaces an earlier one."""
    granted = AliasGranted(
        tenant=parse_tenant(name),
        alias=parse_alias(alias),
        entitlement=entitlement,
        classes=tuple(JobClass(c) for c in classes) or tuple(JobClass),
        tokens_max=tokens_max,
        not_before_ms=_ms(start) or 0,
        expires_at_ms=_ms(end),
        granted_by=getpass.getuser(),
    )
    at_desk(lambda desk: desk.append(TENANTS.name, desk.tenant(name).tenant, granted))
    click.echo(f"granted {alias} to {name}")


@tenant.command()
@click.argument("name")
@click.argument("alias")
@click.option("--reason", required=True)
def withdraw(name: str, alias: str, reason: str) -> None:
    """Take the ALIAS away from the tenant NAME, from the next job on. Jobs admitted before are not touched."""
    gone = AliasWithdrawn(
        tenant=parse_tenant(name), alias=parse_alias(alias), reason=reason, withdrawn_by=getpass.getuser()
    )
    at_desk(lambda desk: desk.append(TENANTS.name, desk.tenant(name).tenant, gone))
    click.echo(f"withdrew {alias} from {name}")


@tenant.command()
@click.argument("name")
def show(name: str) -> None:
    """Show the tenant NAME: its limits and its grants."""
    configured, grants = at_desk(lambda desk: _shown(desk, name))
    print_table(("limit", "value"), configured)
    print_table(("alias", "entitlement", "classes", "tokens max", "from", "until"), grants)


async def _shown(desk: Desk, name: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    tenant = desk.tenant(name)
    limits = tenant.model_dump(mode="json", exclude={"type", "version", "tenant"})
    grants = [grant for (owner, _), grant in sorted(desk.registry.grants.items()) if owner == name]
    rows: list[tuple[str, ...]] = [
        (
            grant.alias,
            grant.entitlement,
            ", ".join(grant.classes),
            str(grant.tokens_max or ""),
            _time(grant.not_before_ms or None),
            _time(grant.expires_at_ms),
        )
        for grant in grants
    ]
    return [(field, str(value)) for field, value in limits.items()], rows


def _ms(time: datetime | None) -> int | None:
    return None if time is None else round(time.replace(tzinfo=UTC).timestamp() * 1000)


def _time(time_ms: int | None) -> str:
    return "" if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()


@tenant.command()
@click.argument("name")
@click.option("--show-password", is_flag=True, help="Print the new password; it is kept in the stack's file anyway.")
def rotate(name: str, show_password: bool) -> None:
    """Give the tenant NAME a new Kafka password. The old one opens no connection from then on."""
    stack = running_stack()
    changed = at_desk(lambda desk: platform.rotate_tenant(desk, stack, name))
    click.echo(f"rotated the password of {name}")
    if show_password:
        click.echo(changed.kafka(name).password)


@tenant.command()
@click.argument("name")
def remove(name: str) -> None:
    """Stop serving the tenant NAME, revoke its adapters, take its Kafka user away. Its topics stay as the record.

    Where it was interrupted, run it again.
    """
    stack = running_stack()
    revoked = at_desk(lambda desk: platform.remove_tenant(desk, stack, name))
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
