"""The thread that owns a synchronous engine: commands in order, a step whenever there is work, asleep otherwise."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

from consumers.engines.protocol import Artifact, Delta, EngineError, EngineRequest
from schemas.jobs import Message

Result = TypeVar("Result")
StepOutputs = list[tuple[str, Delta | EngineError]]


class Core(Protocol):
    """The synchronous half of an engine. All but `encode` run on the engine's thread, never during a step."""

    def start(self) -> None:
        """Load the base. May raise anything."""

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """As `Engine.encode`. Runs on the event loop, beside steps."""

    def add(self, artifact: Artifact, int_id: int) -> int:
        """Load an adapter; its bytes. May raise anything and leave anything behind: `remove` follows."""

    def remove(self, int_id: int) -> None:
        """Drop whatever there is under the id, also after a failed `add`."""

    def listed(self) -> frozenset[int]:
        """The ids the engine itself believes it holds, half-loaded ones included."""

    def admit(self, request: EngineRequest, int_id: int) -> None:
        """Queue a request for the next step. Raises `RequestInvalid`."""

    def abort(self, request_id: str) -> None:
        """Forget a request; no error if it is unknown. No output of it may follow."""

    def busy(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> StepOutputs:
        """One step for all rows. If it raises, `recover` is called."""

    def recover(self) -> list[str]:
        """After a failed step: forget every request, and every cache that the step may have spoilt. Raises: dead."""

    def reset_cache(self) -> None:
        """As `Engine.reset_cache`."""

    def close(self) -> None:
        """Free everything."""


class EngineThread:
    """A daemon, so that a step stuck in native code cannot keep the process from ending."""

    def __init__(self, core: Core, on_step: Callable[[Future[StepOutputs], Future[list[str]] | None], None]) -> None:
        self._core = core
        self._on_step = on_step
        # Bounded by the callers: one command per load, request or abort, and those are bounded by slots and window.
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._step_began_s: float | None = None

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def step_age_s(self) -> float:
        """How long the current step has been running."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Run a command before the next step."""
        future: Future[Result] = Future()
        self._commands.put(partial(_attempt, future, command))
        return future

    def finish(self) -> None:
        """End the thread after the commands so far."""
        self._commands.put(None)

    def _run(self) -> None:
        while self._obey():
            self._step()

    def _obey(self) -> bool:
        """Commands, until the engine has something to do and no command waits; False after `finish`."""
        while not (self._core.busy() and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        self._step_began_s = time.monotonic()
        step = _attempt(Future[StepOutputs](), self._core.step)
        recovery = _attempt(Future[list[str]](), self._core.recover) if step.exception() else None
        self._step_began_s = None
        self._on_step(step, recovery)


def _attempt(future: Future[Result], command: Callable[[], Result]) -> Future[Result]:
    try:
        future.set_result(command())
    except Exception as error:  # noqa: BLE001  # Engines raise bare Exceptions; whoever holds the future decides.
        future.set_exception(error)
    return future
