"""`switchyard adapter`: submit, approve, revoke, list, show."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ledger.registry import AdapterEntry
from producers.cli.at_desk import at_desk, print_table
from producers.release import publish
from producers.release.desk import Desk, Unknown
from producers.release.publish import Submission
from schemas.ids import is_digest, parse_alias

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def adapter() -> None:
    """Adapters: submit, approve, revoke, list, show."""


@adapter.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--tenant", required=True, help="Who owns the adapter.")
@click.option("--alias", help="The tenant's name for it, pointed at it when it is approved.")
@click.option("--base", required=True, help="The base it was trained on: a name or a digest.")
@click.option("--training-data-version", help="Recorded in the manifest.")
@click.option("--evaluation-report", type=FILE, help="Stored; its digest is recorded in the manifest.")
@click.option("--max-replicas", default=1, show_default=True, type=click.IntRange(1, 64), help="Home partitions.")
def submit(directory: Path, **options: Any) -> None:
    """Scan, validate and store the adapter in DIRECTORY, and print its digest."""
    # `Any`: click has checked them, and they are named like the fields.
    submission = Submission(directory=directory, **options)
    manifest = at_desk(lambda desk: publish.submit(desk, submission))
    click.echo(manifest.digest)


@adapter.command()
@click.argument("digest")
@click.option("--wait", default=0.0, type=click.FloatRange(0), help="Seconds to wait for the gate's report.")
def approve(digest: str, wait: float) -> None:
    """Admit the adapter DIGEST after it passed its gate, and point its alias."""
    with Console(stderr=True).status("approving") as status:
        approved = at_desk(lambda desk: publish.approve(desk, digest, wait, status.update))
    click.echo(f"approved {approved.adapter}")


@adapter.command()
@click.argument("digest")
@click.option("--reason", required=True, help="Recorded for the audit.")
@click.option("--wait", default=30.0, show_default=True, type=click.FloatRange(0), help="Seconds; 0: do not wait.")
def revoke(digest: str, reason: str, wait: float) -> None:
    """Revoke the adapter DIGEST for ever and wait until every worker says that it is gone."""
    with Console(stderr=True).status("revoking") as status:
        workers = at_desk(lambda desk: publish.revoke(desk, digest, reason, wait, status.update))
    click.echo(f"revoked {digest}" + "".join(f"\n{worker}: drained" for worker in workers))


@adapter.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_(tenant: str | None, as_json: bool) -> None:
    """List adapters with their state."""
    rows = at_desk(lambda desk: _rows(desk, tenant))
    if as_json:
        for row in rows:
            click.echo(json.dumps(row, sort_keys=True))
        return
    columns = ("digest", "tenant", "state", "rank", "base", "aliases")
    print_table(columns, ([str(row[column]) for column in columns] for row in rows))


@adapter.command()
@click.argument("name")
@click.option("--tenant", help="Whose alias NAME is.")
def show(name: str, tenant: str | None) -> None:
    """Print everything the registry says of an adapter, named by digest or by a tenant's alias."""
    document = at_desk(lambda desk: _document(desk, name, tenant))
    click.echo(json.dumps(document, indent=2, sort_keys=True))


async def _rows(desk: Desk, tenant: str | None) -> list[dict[str, Any]]:
    """One JSON object per adapter."""
    return [
        _summary(desk, entry)
        for entry in desk.registry.adapters.values()
        if entry.manifest is not None and tenant in (None, entry.manifest.owner)
    ]


def _summary(desk: Desk, entry: AdapterEntry) -> dict[str, Any]:
    manifest = entry.manifest
    assert manifest is not None
    base = desk.registry.bases.get(manifest.base)
    pointing = [
        alias if tenant == manifest.owner else f"{tenant}/{alias}"
        for (tenant, alias), pointed in sorted(desk.registry.aliases.items())
        if pointed.stable == entry.digest
    ]
    return {
        "digest": entry.digest,
        "tenant": manifest.owner or "(zero adapter)",
        "state": entry.state,
        "rank": manifest.rank,
        "base": base.manifest.name if base else manifest.base,
        "aliases": " ".join(pointing),
    }


async def _document(desk: Desk, name: str, tenant: str | None) -> dict[str, Any]:
    digest = name if is_digest(name) else _resolve(desk, name, tenant)
    entry = desk.adapter(digest)
    records = {
        "submitted": entry.submitted,
        "gated": entry.gated,
        "approved": entry.approved,
        "revoked": entry.revoked,
    }
    return {
        **_summary(desk, entry),
        "manifest": entry.manifest.model_dump(mode="json") if entry.manifest else None,
        "drained": [receipt.model_dump(mode="json") for receipt in entry.drained],
        **{
            what: record.model_dump(mode="json", exclude={"manifest"})
            for what, record in records.items()
            if record is not None
        },
    }


def _resolve(desk: Desk, alias: str, tenant: str | None) -> str:
    if tenant is None:
        raise Unknown(f"{alias[:90]!r} is no digest; to name an alias, say whose it is with --tenant")
    pointed = desk.registry.aliases.get((tenant, parse_alias(alias)))
    if pointed is None or pointed.stable is None:
        raise Unknown(f"tenant {tenant!r} has no alias {alias!r}")
    return pointed.stable
