"""`switchyard worker`: what the workers of this machine say of themselves."""

import json
from collections.abc import Iterable
from pathlib import Path

import click
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from infra.settings import StackFile, home_directory
from schemas.errors import SwitchyardError
from schemas.memory import MemoryReport

PARTS = (
    "base_weights", "slots", "host_cache", "workspace", "kv_cache", "fragmentation", "unexplained", "process", "limit",
)  # fmt: skip
WIDTH_MAX = 400


class NoReport(SwitchyardError):
    """No worker of this stack has said anything of its memory yet."""


@click.group()
def worker() -> None:
    """What the workers of this machine hold."""


@worker.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array, a report per worker.")
def memory(as_json: bool) -> None:
    """Show where each worker's memory is, in MiB, and what adapters take by rank and modules, in KiB.

    On a CPU `process` is the sum of the parts. `rows` below its maximum: memory is short, and less is admitted.
    """
    from consumers.worker.watermark import REPORT

    stack = StackFile.load(home_directory())
    files = sorted((stack.home / name / REPORT for name in stack.processes), key=str)
    reports = [_read(path) for path in files if path.is_file()]
    if not reports:
        raise NoReport
    if as_json:
        click.echo(json.dumps([report.model_dump(mode="json") for report in reports], indent=2))
        return
    parts = _table(("worker",), ("rows", *(part.replace("_", " ") for part in PARTS)))
    sizes = _table(("worker", "engine", "modules"), ("rank", "measured", "predicted", "slot"))
    for report in reports:
        shown = (f"{getattr(report, part) / (1 << 20):.1f}" for part in PARTS)
        parts.add_row(report.worker, f"{report.rows}/{report.rows_max}", *shown)
        for size in report.adapters:
            shown = (f"{count / 1024:.0f}" for count in (size.bytes, size.predicted, report.slot_bytes))
            sizes.add_row(report.worker, report.engine, " ".join(size.modules), str(size.rank), *shown)
    for table in (parts, sizes):
        Console(width=WIDTH_MAX, highlight=False).print(table)


def _table(words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in words:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, no_wrap=True, justify="right")
    return table


def _read(path: Path) -> MemoryReport:
    try:
        return MemoryReport.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise NoReport(f"{path} was written by another version of Switchyard") from error
