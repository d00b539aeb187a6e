"""`switchyard tenant impersonate`: a signed, short-lived grant to act in a tenant's name."""

from datetime import UTC, datetime
from pathlib import Path

import click

from infra.clock import SystemClock
from infra.files import write_private
from producers.cli.at_desk import at_desk
from producers.cli.options import duration_ms
from producers.release import impersonate as release
from schemas.digest import canonical
from schemas.impersonation import IMPERSONATION_MS_MAX


@click.command()
@click.argument("name")
@click.option("--reason", required=True, help="Why, for the audit: a ticket, a complaint, an incident.")
@click.option(
    "--for",
    "lasts_ms",
    callback=lambda _ctx, _param, text: duration_ms(text, IMPERSONATION_MS_MAX),
    metavar="DURATION",
    default="15m",
    show_default=True,
    help="How long, at most 1h: 90s, 15m.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to, readable by you alone.")
def impersonate(name: str, reason: str, lasts_ms: int, out: Path | None) -> None:
    """Sign a grant to submit jobs in the name of the tenant NAME, and print it.

    Use it with `switchyard job run --as-tenant NAME --grant FILE`. The audit says who you are, why you act and until
    when: before there is a grant, and again for every such job. Where it does not take the record, there is no grant.
    The grant is worth nothing without the platform's own Kafka user.
    """
    now_ms = SystemClock().now_ms()
    grant = at_desk(lambda desk: release.impersonate(desk, name, reason, now_ms, lasts_ms))
    content = canonical(grant.model_dump(mode="json"))
    if out is None:
        click.echo(content)
    else:
        write_private(out, content)
    granted = grant.impersonation
    until = datetime.fromtimestamp(granted.expires_at_ms / 1000, UTC).isoformat(timespec="seconds")
    click.echo(f"{granted.admin} may act for {granted.tenant} until {until}", err=True)
