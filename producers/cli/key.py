"""`switchyard key`: init."""

import click

from producers.cli.at_desk import at_desk
from producers.release import platform


@click.group()
def key() -> None:
    """Signing keys of routers, the registry and the gate."""


@key.command()
def init() -> None:
    """Make and publish the keys that are missing. Private halves stay in files that only you can read."""
    for key_id, made in at_desk(platform.init_keys).items():
        click.echo(f"{key_id}: {'made and published' if made else 'there already'}")
