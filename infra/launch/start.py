"""Starts processes, waits until they are ready, and leaves none behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Final, Self

from infra.launch import guard, reaper
from infra.launch.plan import PortOpens, ProcessSpec, SaysReady
from infra.settings import Running
from schemas.errors import SwitchyardError

POLL_SECONDS: Final = 0.05
PROBE_SECONDS_MAX: Final = 2.0
LOG_LINES_SHOWN: Final = 15
# What a child needs from the launcher's environment; settings of ours reach it through its spec alone.
OWN_PREFIX: Final = "SWITCHYARD_"


class StartFailed(SwitchyardError):
    """A process of the stack did not become ready."""


class Process:
    """One started process, in a process group of its own."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *spec.argv],
                cwd=spec.folder,
                env={**inherited, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> Running:
        return Running(pid=self.pid, log=self.log, metrics_port=self.spec.metrics_port)

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """To the process alone, as an operator would send it."""
        self._popen.send_signal(number)

    def wait_ready(self) -> None:
        """Raises StartFailed with the end of its log."""
        deadline = monotonic() + self.spec.ready_seconds_max
        while not is_ready(self.spec.ready):
            if self.exit_code() is not None:
                raise StartFailed(f"{self.spec.name} ended at its start (code {self.exit_code()}):\n{self._tail()}")
            if monotonic() > deadline:
                raise StartFailed(
                    f"{self.spec.name} was not ready after {self.spec.ready_seconds_max:.0f} s:\n{self._tail()}"
                )
            sleep(POLL_SECONDS)

    def wait_exit(self, seconds_max: float) -> int | None:
        """Its exit code, or None when it still runs after that time."""
        try:
            return self._popen.wait(seconds_max)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def stop(self) -> None:
        """Ask it to end, wait its time, then kill what is left of its group."""
        if self.exit_code() is None:
            self.signal(signal.SIGTERM)
            self.wait_exit(self.spec.stop_seconds_max)
        self.kill()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"(from {self.log})", *lines[-LOG_LINES_SHOWN:]])


class Launcher:
    """Owns processes; on leaving, none of them is left. Use it from a thread that lives as long as they shall."""

    def __init__(self, home: Path, *, orderly: bool = True) -> None:
        self._logs = home / "logs"
        self._orderly = orderly
        self.processes: dict[str, Process] = {}
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, spec: ProcessSpec) -> Process:
        """Start one process without waiting for it. A name may be used again once its process has ended."""
        former = self.processes.get(spec.name)
        assert former is None or former.exit_code() is not None, f"{spec.name} still runs"
        process = Process(spec, self._logs / f"{spec.name}.log")
        self._tell_reaper(f"+{process.pid}")
        if former is not None:
            self._forget(former)
        self.processes[spec.name] = process
        return process

    def start_stage(self, specs: tuple[ProcessSpec, ...], say: Callable[[str], None]) -> None:
        """Start processes together and wait until all that are awaited are ready."""
        started = [self.start(spec) for spec in specs]
        for process in started:
            if not process.spec.awaited:
                say(f"{process.spec.name} is starting")
                continue
            process.wait_ready()
            say(f"{process.spec.name} is ready")

    def close(self) -> None:
        """Stop everything, last started first."""
        for process in reversed(self.processes.values()):
            if self._orderly:
                process.stop()
            else:
                process.kill()
        self.processes.clear()
        # Its input's end: what is left of any group dies with it.
        self._reaper.communicate(timeout=PROBE_SECONDS_MAX)

    def _forget(self, former: Process) -> None:
        former.kill()
        self._tell_reaper(f"-{former.pid}")

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{line}\n")
        self._reaper.stdin.flush()


def is_ready(check: PortOpens | SaysReady) -> bool:
    """Whether a check holds now."""
    if isinstance(check, PortOpens):
        with socket.socket() as probe:
            probe.settimeout(PROBE_SECONDS_MAX)
            return probe.connect_ex(("127.0.0.1", check.port)) == 0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{check.port}/ready", timeout=PROBE_SECONDS_MAX) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
