"""Options that several commands share."""

import click

from schemas.errors import InvalidName
from schemas.ids import parse_tenant


def _tenant(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return parse_tenant(value)
    except InvalidName as error:
        raise click.BadParameter(str(error), ctx, parameter) from error


tenant_option = click.option(
    "--tenant", required=True, envvar="SWITCHYARD_TENANT", show_envvar=True, callback=_tenant, help="Whose job this is."
)
