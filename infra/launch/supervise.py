"""Keeps a stack up until it is told to stop: `python -m infra.launch.supervise`, started by `switchyard up`."""

import contextlib
import os
import signal
import sys
from collections import deque
from pathlib import Path
from threading import Event
from time import monotonic
from typing import ClassVar, Final

from infra import logs
from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from infra.settings import EngineSettings, Settings, read
from schemas.errors import SwitchyardError

LOOK_SECONDS: Final = 1.0
# A process that ends so often in so short a time has a fault that no restart mends.
RESTARTS_MAX: Final = 10
WINDOW_SECONDS: Final = 600.0


class StackSettings(Settings):
    """What `switchyard up` passes on."""

    section: ClassVar[str] = "stack"
    home: Path
    workers: int = 1
    pool: str = "main"
    # Kafka and Redis only.
    bare: bool = False
    containers: bool = False

    def options(self, engine: EngineSettings) -> StackOptions:
        return StackOptions(
            home=self.home,
            router=not self.bare,
            settler=not self.bare,
            gate=not self.bare,
            workers=0 if self.bare else self.workers,
            engine=engine,
            containers=self.containers,
            engines_awaited=False,
            pools=(self.pool,),
        )


def main() -> int:
    logs.configure("supervisor")
    log = logs.ActionLog("supervisor")
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    options = read(StackSettings).options(read(EngineSettings))
    try:
        with running_stack(options, say=_say, supervisor=os.getpid()) as stack:
            _say("UP")
            _watch(stack, stopping, log)
    except SwitchyardError as error:
        log.error("stack.failed", detail=str(error))
        _say(f"FAILED {error}")
        return 1
    return 0


def _watch(stack: Stack, stopping: Event, log: logs.ActionLog) -> None:
    """Start again what ended by itself. One that ends again and again is left as it is, and the others go on."""
    ended_at: dict[str, deque[float]] = {}
    given_up: set[str] = set()
    while not stopping.wait(LOOK_SECONDS):
        for name, code in stack.ended().items():
            if name in given_up:
                continue
            times = ended_at.setdefault(name, deque(maxlen=RESTARTS_MAX))
            if len(times) == RESTARTS_MAX and monotonic() - times[0] < WINDOW_SECONDS:
                given_up.add(name)
                log.error("process.given_up", name=name, restarts=RESTARTS_MAX)
                continue
            times.append(monotonic())
            log.warning("process.ended", name=name, code=code)
            stack.restart(name)


def _say(line: str) -> None:
    """To whoever started the stack, if it is still there to hear."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
