"""The launcher leaves nothing behind, whatever ends it. Each test starts a stack of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.launch.plan import REPOSITORY, PortOpens, ProcessSpec, StackOptions
from infra.launch.processes import free_port
from infra.launch.stack import Stack, running_stack
from infra.launch.start import Launcher, StartFailed
from infra.settings import StackFile

pytestmark = pytest.mark.kafka

WAIT_S = 60.0
STOP_S = 20.0
HOLDER = """
import sys, time
from pathlib import Path
from infra.launch.plan import StackOptions
from infra.launch.stack import running_stack
try:
    with running_stack(StackOptions(home=Path(sys.argv[1]))) as stack:
        print("up", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def processes_of(home: Path) -> list[str]:
    """Every process of this machine that names this home, or works in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            place = str((folder / "cwd").readlink())
        except OSError:
            continue
        if str(home) in command or place.startswith(str(home)):
            found.append(command)
    return found


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that holds a running stack in `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_ctrl_c_stops_everything_in_order(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(processes_of(tmp_path)) == 3

    holder.send_signal(signal.SIGINT)

    assert holder.wait(STOP_S) == 0
    assert processes_of(tmp_path) == []
    assert StackFile.load(tmp_path).processes == {}


def test_a_killed_launcher_leaves_no_process(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(processes_of(tmp_path)) == 3

    holder.kill()
    holder.wait(STOP_S)

    assert until(lambda: processes_of(tmp_path) == [], STOP_S)


def test_children_of_a_process_die_with_the_launcher(tmp_path: Path) -> None:
    port = free_port()
    mark = f"sleep-{tmp_path}"
    child = f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 300 # {mark}'])"
    body = f"{child}; import socket; s = socket.create_server(('127.0.0.1', {port})); s.accept()"
    holder = (
        "import sys, os, signal; from pathlib import Path; from infra.launch.start import Launcher;"
        "from infra.launch.plan import ProcessSpec, PortOpens;"
        f"spec = ProcessSpec(name='parent', argv=(sys.executable, '-c', {body!r}), folder=Path('/'),"
        f" ready=PortOpens({port}));"
        f"launcher = Launcher(Path({str(tmp_path)!r})); launcher.start(spec).wait_ready();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    subprocess.run([sys.executable, "-c", holder], cwd=REPOSITORY, check=False)

    assert until(lambda: processes_of(tmp_path) == [], STOP_S)


def test_a_stack_goes_on_with_its_data_and_passwords(tmp_path: Path) -> None:
    options = StackOptions(home=tmp_path)
    with running_stack(options) as first:
        password = first.add_tenant("acme").password
        key = (tmp_path / "keys" / "route-1.pem").read_bytes()

    with running_stack(options) as second:
        assert second.kafka("acme").password == password
        assert second.add_tenant("acme").password == password

    assert (tmp_path / "keys" / "route-1.pem").read_bytes() == key
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600


def test_a_second_stack_in_the_same_home_is_refused(stack: Stack) -> None:
    options = StackOptions(home=stack.file.home)

    with pytest.raises(StartFailed, match="already runs"), running_stack(options):
        pass


def test_a_process_that_ends_at_its_start_shows_its_last_words(tmp_path: Path) -> None:
    spec = ProcessSpec(
        name="broken", argv=("sh", "-c", "echo no such luck; exit 3"), folder=tmp_path, ready=PortOpens(free_port())
    )

    with Launcher(tmp_path) as launcher, pytest.raises(StartFailed, match=r"(?s)code 3.*no such luck"):
        launcher.start(spec).wait_ready()


def switchyard(home: Path, command: str) -> subprocess.CompletedProcess[str]:
    """One of the launcher's commands, as a user runs it."""
    name, _, arguments = command.partition(" ")
    program = f"from infra.launch.cli import {name}; {name}({arguments.split()!r})"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "SWITCHYARD_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_up_status_and_down(tmp_path: Path) -> None:
    started = switchyard(tmp_path, "up --bare")
    shown = switchyard(tmp_path, "status")
    again = switchyard(tmp_path, "up --bare")
    stopped = switchyard(tmp_path, "down")

    assert started.returncode == shown.returncode == stopped.returncode == 0
    assert "kafka" in shown.stdout
    assert "redis" in shown.stdout
    assert shown.stdout.count(" ready ") == 2
    assert "already runs" in again.stderr
    assert processes_of(tmp_path) == []
    assert "No stack runs here" in switchyard(tmp_path, "status").stderr


def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    switchyard(tmp_path, "up --bare")
    before = StackFile.load(tmp_path).processes["redis"].pid

    os.kill(before, signal.SIGKILL)

    try:
        assert until(lambda: StackFile.load(tmp_path).processes["redis"].pid != before, WAIT_S)
    finally:
        switchyard(tmp_path, "down")
    assert processes_of(tmp_path) == []


def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    switchyard(tmp_path, "up --bare")
    supervisor = StackFile.load(tmp_path).supervisor
    assert supervisor is not None

    os.kill(supervisor, signal.SIGKILL)

    assert until(lambda: processes_of(tmp_path) == [], STOP_S)
    assert "No stack runs here" in switchyard(tmp_path, "status").stderr
