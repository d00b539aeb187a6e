"""`switchyard usage`: what one tenant used."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console

from producers.cli.at_desk import at_desk, print_table, running_stack
from producers.cli.options import tenant_name
from producers.release.desk import Desk
from producers.release.usage import Sum, TenantUsage
from producers.release.usage_log import UsageLog
from schemas.jobs import Outcome
from schemas.topics import Role

SUMS = ("jobs", "outcomes", "prompt tokens", "completion tokens")

Aliases = Mapping[str, list[str]]


@click.command()
@click.option("--tenant", required=True, callback=tenant_name, help="Whose usage; nobody else's is shown.")
@click.option("--since", type=click.DateTime(), help="Only jobs that ended from this time on (UTC).")
@click.option("--until", type=click.DateTime(), help="Only jobs that ended before this time (UTC).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def usage(tenant: str, since: datetime | None, until: datetime | None, as_json: bool) -> None:
    """Show what a tenant used: jobs and tokens, per adapter and per day (UTC).

    Beside an adapter stand the tenant's aliases that point at it now. A tenant without usage and one that nobody knows
    look the same.
    """
    counted = TenantUsage(tenant, _ms(since), _ms(until))
    with Console(stderr=True).status("reading usage") as status:
        log = UsageLog(
            running_stack().kafka(Role.OPERATOR), lambda percent: status.update(f"reading usage: {percent} %")
        )

        async def read(desk: Desk) -> Aliases:
            await log.fold(counted)
            return _aliases(desk, tenant)

        aliases = at_desk(read)
    if as_json:
        click.echo(json.dumps(_document(counted, aliases), indent=2, sort_keys=True))
        return
    print_table(("tenant", "since", "until", *SUMS), [(tenant, _time(since), _time(until), *_cells(counted.total))])
    click.echo()
    print_table(
        ("adapter", "aliases", *SUMS),
        ((digest, " ".join(aliases.get(digest, [])), *_cells(found)) for digest, found in _sorted(counted.adapters)),
    )
    click.echo()
    print_table(("day", *SUMS), ((day, *_cells(found)) for day, found in _sorted(counted.days)))


def _aliases(desk: Desk, tenant: str) -> Aliases:
    """The tenant's own aliases by the digest that they point at; another's may point at a base's zero adapter too."""
    found: dict[str, list[str]] = {}
    for (owner, alias), pointed in sorted(desk.registry.aliases.items()):
        if owner == tenant and pointed.stable is not None:
            found.setdefault(pointed.stable, []).append(alias)
    return found


def _document(counted: TenantUsage, aliases: Aliases) -> dict[str, Any]:
    return {
        "tenant": counted.tenant,
        "since_ms": counted.since_ms,
        "until_ms": counted.until_ms,
        **_fields(counted.total),
        "adapters": [
            {"adapter": digest, "aliases": aliases.get(digest, []), **_fields(found)}
            for digest, found in _sorted(counted.adapters)
        ],
        "days": [{"day": day, **_fields(found)} for day, found in _sorted(counted.days)],
    }


def _fields(found: Sum) -> dict[str, Any]:
    return {
        "jobs": found.jobs,
        "outcomes": {outcome.value: found.outcomes[outcome] for outcome in Outcome},
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "cached_tokens": found.cached_tokens,
    }


def _cells(found: Sum) -> tuple[str, ...]:
    outcomes = ", ".join(f"{found.outcomes[outcome]} {outcome}" for outcome in Outcome if found.outcomes[outcome])
    return str(found.jobs), outcomes or "none", str(found.prompt_tokens), str(found.completion_tokens)


def _sorted(sums: Mapping[str, Sum]) -> list[tuple[str, Sum]]:
    return sorted(sums.items(), key=lambda item: item[0])


def _ms(time: datetime | None) -> int | None:
    return None if time is None else round(time.replace(tzinfo=UTC).timestamp() * 1000)


def _time(time: datetime | None) -> str:
    return "" if time is None else time.replace(tzinfo=UTC).isoformat()
