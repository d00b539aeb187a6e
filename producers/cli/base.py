"""`switchyard base`: add, grant, list."""

from pathlib import Path

import click

from producers.cli.at_desk import at_desk, print_table
from producers.release import platform
from producers.release.desk import Desk

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def base() -> None:
    """Base models: add, grant, list."""


@base.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--name", required=True, help="What people call it; its identity is its digest.")
@click.option(
    "--rank-max",
    default=platform.ZERO_RANK,
    show_default=True,
    type=click.IntRange(1, 512),
    help="The smallest rank a pool of it will serve: the rank of its zero adapter.",
)
def add(directory: Path, name: str, rank_max: int) -> None:
    """Hash the base model in DIRECTORY, make its zero adapter, and print its digest."""
    added = at_desk(lambda desk: platform.add_base(desk, directory, name, rank_max))
    click.echo(added.base)


@base.command()
@click.argument("name")
@click.option("--tenant", required=True, help="Who may use it without an adapter.")
@click.option("--alias", default="base", show_default=True, help="The tenant's name for it.")
def grant(name: str, tenant: str, alias: str) -> None:
    """Let a tenant's alias name the base NAME (or digest) itself."""
    pointed = at_desk(lambda desk: platform.grant(desk, name, tenant, alias))
    click.echo(f"{tenant}/{alias} -> {pointed.stable}")


@base.command("list")
def list_() -> None:
    """List bases with their zero adapters."""
    print_table(("name", "digest", "zero adapter"), at_desk(_rows))


async def _rows(desk: Desk) -> list[tuple[str, str, str]]:
    return [(added.manifest.name, digest, added.zero_adapter) for digest, added in desk.registry.bases.items()]
