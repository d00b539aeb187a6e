"""`switchyard batch`: an OpenAI batch file in, an output and an error file out."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producers.cli.options import acting_for, acting_options

if TYPE_CHECKING:
    from producers.batch_files import Input, Results

# Where no terminal shows a bar: a line after every so many percent.
PLAIN_STEP_PERCENT = 10
RESULT_FILE = click.Path(dir_okay=False, resolve_path=True, path_type=Path)


@click.group()
def batch() -> None:
    """Run a file of jobs in OpenAI's batch format, and resume it."""


@batch.command()
@acting_options
@click.argument("source", metavar="IN.JSONL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=RESULT_FILE, help="Answers, as they come.")
@click.option("--errors", required=True, type=RESULT_FILE, help="Lines without one.")
@click.option("--cancel-on-interrupt", is_flag=True, help="On Ctrl-C, take the unanswered jobs back.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    tenant: str | None,
    as_tenant: str | None,
    grant: Path | None,
    source: Path,
    out: Path,
    errors: Path,
    cancel_on_interrupt: bool,
) -> None:
    """Run every line of IN.JSONL as a job of class batch.

    Every line ends up in one of the two files, in the order of the answers. Stopped by Ctrl-C or a crash, the same
    command goes on where it was: no line is lost, none is answered twice. OUT.state.json remembers the batch.

    With --as-tenant every job carries the grant. One that ends before all lines are submitted stops the run; what was
    submitted goes on, and the same command with a new grant resumes. A line whose grant is refused after all, because
    its key was revoked, goes to the error file with the code `impersonation`.
    """
    from infra.clock import SystemClock
    from producers.batch import BatchRun, open_batch
    from producers.batch_files import BatchRefused, Input, Results
    from producers.impersonation import load_grant, way_in

    owner = acting_for(ctx, tenant, as_tenant, grant)
    impersonation = load_grant(grant) if grant is not None else None
    if len({source.resolve(), out, errors}) < 3:
        raise BatchRefused("the input, the output and the error file must be three files")
    found = Input.scan(source, impersonation)
    results: Results | None = None

    async def run_it() -> None:
        nonlocal results
        clock = SystemClock()
        settings = await way_in(owner, impersonation, clock.now_ms())
        state = await open_batch(settings, owner, found, out, errors)
        results = Results(out, errors, state)
        with _progress(found, results) as progress:
            work = BatchRun(settings, clock, found, state, results, progress)
            await work.run(cancel_on_interrupt=cancel_on_interrupt)

    try:
        asyncio.run(run_it())
    except KeyboardInterrupt:
        done = len(results.done) if results else 0
        what = "taken back" if cancel_on_interrupt else "left to run"
        click.echo(f"\nstopped after {done} of {found.lines} lines; the others are {what}.", err=True)
        click.echo("Run the same command again to resume.", err=True)
        raise
    finally:
        if results is not None:
            results.close()
    assert results is not None
    click.echo(_totals(found, results), err=True)


def _totals(found: "Input", results: "Results") -> str:
    reasons = ", ".join(f"{count} {code}" for code, count in sorted(results.codes.items()))
    used = results.usage
    return (
        f"{found.lines} lines: {results.completed} completed, {results.codes.total()} errors"
        f"{f' ({reasons})' if reasons else ''}; "
        f"{used.prompt_tokens} prompt + {used.completion_tokens} completion tokens"
    )


@contextmanager
def _progress(found: "Input", results: "Results") -> Iterator[Callable[[], None]]:
    """What to call after every line: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _plain(found, results)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("batch", total=found.lines, completed=len(results.done))
        yield lambda: bar.update(
            task, completed=len(results.done), description=f"batch, {results.codes.total()} errors"
        )


def _plain(found: "Input", results: "Results") -> Callable[[], None]:
    shown = -1

    def show() -> None:
        nonlocal shown
        step = len(results.done) * 100 // max(1, found.lines) // PLAIN_STEP_PERCENT
        if step > shown:
            shown = step
            click.echo(f"{len(results.done)} of {found.lines} lines, {results.codes.total()} errors", err=True)

    return show
