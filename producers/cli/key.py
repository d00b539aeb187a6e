"""`switchyard key`: init, list, rotate, revoke."""

import click

from producers.cli.at_desk import at_desk, print_table
from producers.release import platform
from producers.release.desk import Desk
from schemas.keys import KeyRole


@click.group()
def key() -> None:
    """Signing keys of routers, the registry, the gate and administrators."""


@key.command()
def init() -> None:
    """Make and publish the keys that are missing. Private halves stay in files that only you can read."""
    for key_id, made in at_desk(platform.init_keys).items():
        click.echo(f"{key_id}: {'made and published' if made else 'there already'}")


@key.command("list")
def list_() -> None:
    """List every key that was published or revoked. A role signs with its newest one here."""
    print_table(("key", "role", "state"), at_desk(_rows))


async def _rows(desk: Desk) -> list[tuple[str, ...]]:
    newest = {desk.keys.key_id(role) for role in KeyRole}
    rows = [
        (key_id, found.role.value, "signs" if key_id in newest else "believed")
        for key_id, found in desk.registry.published.items()
    ]
    return sorted(rows + [(key_id, "", "revoked") for key_id in desk.registry.revoked_keys])


@key.command()
@click.argument("role", type=click.Choice([role.value for role in KeyRole]))
def rotate(role: str) -> None:
    """Make and publish the next key of ROLE. Processes sign with it once they start again; the former is believed."""
    click.echo(f"{at_desk(lambda desk: platform.rotate_key(desk, KeyRole(role)))}: made and published")


@key.command()
@click.argument("key_id")
@click.option("--reason", required=True)
def revoke(key_id: str, reason: str) -> None:
    """Believe nothing that KEY_ID signed, from now on and for ever.

    Rotate first and start the processes again: a router whose key is revoked admits nothing, its routes on the way are
    refused, and adapters that a revoked registry key admitted are not served.
    """
    at_desk(lambda desk: platform.revoke_key(desk, key_id, reason))
    click.echo(f"revoked {key_id}")
