"""Options that several commands share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from schemas.errors import InvalidName
from schemas.ids import parse_tenant

Command = TypeVar("Command", bound=Callable[..., Any])
UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


def tenant_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: the name, or a usage error before anything is looked up."""
    try:
        return None if value is None else parse_tenant(value)
    except InvalidName as error:
        raise click.BadParameter(str(error), ctx, parameter) from error


def _tenant_option(required: bool) -> Callable[[Command], Command]:
    return click.option(
        "--tenant",
        required=required,
        envvar="SWITCHYARD_TENANT",
        show_envvar=True,
        callback=tenant_name,
        help="Whose job this is.",
    )


tenant_option = _tenant_option(required=True)


def acting_options(command: Command) -> Command:
    """--tenant, or --as-tenant with --grant; `acting_for` says what was meant."""
    grant = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--grant", type=grant, help="With --as-tenant: what `switchyard tenant impersonate` wrote."),
        click.option(
            "--as-tenant", callback=tenant_name, help="Act in this tenant's name, as an operator with a grant."
        ),
        _tenant_option(required=False),
    ):
        command = option(command)
    return command


def acting_for(ctx: click.Context, tenant: str | None, as_tenant: str | None, grant: Path | None) -> str:
    """The tenant that is meant: its own name, or with a grant another's. Raises UsageError."""
    if as_tenant is None:
        if grant is not None:
            raise click.UsageError("--grant goes with --as-tenant", ctx)
        if tenant is None:
            raise click.UsageError("Missing option '--tenant' (env var: 'SWITCHYARD_TENANT').", ctx)
        return tenant
    if ctx.get_parameter_source("tenant") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give --tenant or --as-tenant, not both", ctx)
    if grant is None:
        made = f"switchyard tenant impersonate {as_tenant} --reason … --out grant.json"
        raise click.UsageError(f"--as-tenant needs a grant; make one with: {made}", ctx)
    return as_tenant


def duration_ms(text: str, ms_max: int) -> int:
    """A number and a unit, such as 90s, 15m or 1h. Raises BadParameter."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smh])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration, such as 90s, 15m or 1h")
    lasts_ms = int(found[1]) * UNIT_MS[found[2]]
    if lasts_ms > ms_max:
        raise click.BadParameter(f"{text} is longer than {ms_max // 60_000}m")
    return lasts_ms
