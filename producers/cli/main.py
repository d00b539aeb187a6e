"""`switchyard`: finds its commands by entry points, and loads the one that is called."""

import ast
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click

from schemas.errors import SwitchyardError

GROUP = "switchyard.commands"
# What a shell expects of a program that Ctrl-C ended.
INTERRUPTED = 130


class Commands(click.Group):
    """The commands of every room, none of which is imported before it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(entry.name for entry in entry_points(group=GROUP))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        for entry in entry_points(group=GROUP, name=cmd_name):
            command = entry.load()
            assert isinstance(command, click.Command)
            return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(
                [(entry.name, _summary(entry)) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)]
            )

    def invoke(self, ctx: click.Context) -> Any:
        """What a command raises on purpose is one sentence for its user; anything else is a bug and shows itself."""
        try:
            return super().invoke(ctx)
        except SwitchyardError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


def _summary(entry: EntryPoint) -> str:
    """The first line of a command's docstring, read from its file: importing eleven modules takes seconds."""
    try:
        spec = importlib.util.find_spec(entry.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return "(not installed)"
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """While a command runs: a library's lines mean nothing to its user, who gets one sentence of ours."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the stack keeps its data. Default: SWITCHYARD_HOME, or .switchyard in this folder.",
)
@click.version_option(package_name="switchyard")
def main(home: Path | None) -> None:
    """Multi-tenant LLM inference with many LoRA adapters on Apache Kafka."""
    click.get_current_context().with_resource(_quiet("aiokafka"))
    if home is not None:
        from infra.credentials import use_home

        use_home(home)
