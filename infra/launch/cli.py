"""`switchyard up`, `down` and `status`: a stack that stays when the terminal closes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Final

import click
from rich.console import Console
from rich.table import Table

from infra.launch.plan import SaysReady
from infra.launch.start import is_ready
from infra.launch.supervise import StackSettings
from infra.settings import EngineSettings, NoStack, StackFile, home_directory, read
from schemas.errors import SwitchyardError

STOP_SECONDS_MAX: Final = 90.0
POLL_SECONDS: Final = 0.1


class NotStopped(SwitchyardError):
    """The stack did not stop in time."""


@click.command()
@click.option("--workers", default=1, show_default=True, help="How many workers to start.")
@click.option("--pool", default="main", show_default=True, help="The pool that they serve.")
@click.option("--bare", is_flag=True, help="Kafka and Redis only, with topics, users and rights.")
@click.option("--containers", is_flag=True, help="Run Kafka and Redis by docker compose instead of natively.")
def up(workers: int, pool: str, bare: bool, containers: bool) -> None:
    """Start a stack that stays: Kafka, Redis, router, settler, gate and workers."""
    home = home_directory()
    if supervisor_of(home) is not None:
        raise SwitchyardError("a stack already runs here; see it with: switchyard status")
    chosen = StackSettings(home=home, workers=workers, pool=pool, bare=bare, containers=containers)
    console = Console(stderr=True)
    with console.status("starting"):
        for line in _supervise(chosen):
            console.print(line)
    click.echo(f"up: {home / 'stack.json'}")


@click.command()
def down() -> None:
    """Stop the stack. Its data stays for the next `up`."""
    home = home_directory()
    pid = supervisor_of(home)
    if pid is None:
        raise NoStack
    os.kill(pid, signal.SIGTERM)
    deadline = monotonic() + STOP_SECONDS_MAX
    while supervisor_of(home) is not None:
        if monotonic() > deadline:
            raise NotStopped(f"the stack did not stop within {STOP_SECONDS_MAX:.0f} s; see {home / 'logs'}")
        sleep(POLL_SECONDS)
    click.echo("down")


@click.command()
def status() -> None:
    """Show the processes of the stack, and whether each is ready."""
    home = home_directory()
    if supervisor_of(home) is None:
        raise NoStack
    table = Table("process", "pid", "state", "metrics", "log", box=None)
    for name, process in StackFile.load(home).processes.items():
        port = process.metrics_port
        ready = port is None or is_ready(SaysReady(port))
        alive = Path(f"/proc/{process.pid}").exists()
        state = "ready" if alive and ready else "starting" if alive else "ended"
        metrics = f"http://127.0.0.1:{port}/metrics" if port else ""
        table.add_row(name, str(process.pid), state, metrics, str(process.log))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def supervisor_of(home: Path) -> int | None:
    """The process that keeps the stack of this home, or None. Another program may have its number by now: look."""
    try:
        pid = StackFile.load(home).supervisor
        if pid is None:
            return None
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (NoStack, FileNotFoundError, ProcessLookupError):
        return None
    return pid if b"infra.launch.supervise" in command else None


def _supervise(chosen: StackSettings) -> Iterator[str]:
    """Start the supervisor on its own and pass on what it says until the stack is up. Raises SwitchyardError."""
    log = chosen.home / "logs" / "supervisor.log"
    chosen.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = {**os.environ, **read(EngineSettings).environment(), **chosen.environment()}
    with log.open("ab") as errors:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "infra.launch.supervise"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    assert supervisor.stdout is not None
    try:
        yield from _until_up(supervisor.stdout, log)
    except BaseException:
        # Interrupted, or failed: nothing is left behind half started.
        supervisor.terminate()
        supervisor.wait(STOP_SECONDS_MAX)
        raise


def _until_up(output: IO[str], log: Path) -> Iterator[str]:
    with output as said:
        for line in said:
            if line == "UP\n":
                return
            if line.startswith("FAILED "):
                raise SwitchyardError(line.removeprefix("FAILED ") + said.read())
            yield line.rstrip()
    raise SwitchyardError(f"the supervisor ended without a word; see {log}")
