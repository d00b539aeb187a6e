"""A synchronous engine on a thread of its own: commands in order, a step whenever there is work, asleep otherwise."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

from consumers.engines.backend import Deliver, Die, Outputs
from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import Artifact, EngineError, EngineFault, EngineRequest, FaultReason
from consumers.engines.residents import Listed
from consumers.engines.steps import Steps
from schemas.jobs import Message

Result = TypeVar("Result")


class Core(Protocol):
    """The engine proper. All but `encode` run on the engine's thread, one at a time."""

    def start(self) -> None:
        """Load the base."""

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """As `Engine.encode`. Runs on the event loop, beside steps."""

    def stage(self, artifact: Artifact, int_id: int) -> None:
        """As `Backend.stage`."""

    def activate(self, int_id: int) -> None:
        """As `Backend.activate`."""

    def deactivate(self, int_id: int) -> None:
        """As `Backend.deactivate`."""

    def remove(self, int_id: int) -> None:
        """As `Backend.remove`."""

    def listed(self) -> Listed:
        """As `Backend.listed`."""

    def memory(self) -> Memory:
        """As `Backend.memory`."""

    def sizes(self) -> Sizes:
        """As `Backend.sizes`."""

    def admit(self, request: EngineRequest, int_id: int) -> None:
        """Queue a request for the next step. Raises `RequestInvalid`."""

    def abort(self, request_id: str) -> None:
        """Forget a request; no error if it is unknown."""

    def busy(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> Outputs:
        """One step for all rows. If it raises, `recover` is called."""

    def recover(self) -> list[str]:
        """After a failed step: forget every request, and every cache that the step may have spoilt. Raises: dead."""

    def reset_cache(self) -> None:
        """As `Backend.reset_cache`."""

    def close(self) -> None:
        """Free everything."""


class ThreadBackend:
    """Implements `Backend`. The thread is a daemon: a step stuck in native code cannot keep the process from ending."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Bounded by the callers: a command is a load, a request or an abort, and those are bounded by slots and window.
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._step_began_s: float | None = None
        self._steps = Steps()

    async def start(self, deliver: Deliver, die: Die) -> None:
        loop = asyncio.get_running_loop()
        self._deliver: Deliver = lambda outputs: loop.call_soon_threadsafe(deliver, outputs)
        self._die: Die = lambda message: loop.call_soon_threadsafe(die, message)
        self._thread.start()
        await self._call(self._core.start)

    async def stop(self) -> None:
        if self._thread.is_alive():
            closing = self._call(self._core.close)
            self._commands.put(None)
            await closing

    def stuck_s(self) -> float:
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._core.encode(prompt)

    async def stage(self, artifact: Artifact, int_id: int) -> Listed:
        return await self._change(partial(self._core.stage, artifact, int_id))

    async def activate(self, int_id: int) -> Listed:
        return await self._change(partial(self._core.activate, int_id))

    async def deactivate(self, int_id: int) -> Listed:
        return await self._change(partial(self._core.deactivate, int_id))

    async def remove(self, int_id: int) -> Listed:
        return await self._change(partial(self._core.remove, int_id))

    async def listed(self) -> Listed:
        return await self._call(self._core.listed)

    async def memory(self) -> Memory:
        return await self._call(self._core.memory)

    async def sizes(self) -> Sizes:
        return await self._call(self._core.sizes)

    async def reset_cache(self) -> None:
        await self._call(self._core.reset_cache)

    def submit(self, request: EngineRequest, int_id: int) -> None:
        self._commands.put(partial(self._admit, request, int_id))

    def abort(self, request_id: str) -> None:
        # An abort that fails leaves its request to the next step, which says so.
        self._commands.put(partial(_attempt, Future[None](), partial(self._abort, request_id)))

    def _change(self, change: Callable[[], None]) -> asyncio.Future[Listed]:
        """A change and what there is after it, with no step between."""

        def command() -> Listed:
            change()
            return self._core.listed()

        return self._call(command)

    def _call(self, command: Callable[[], Result]) -> asyncio.Future[Result]:
        future: Future[Result] = Future()
        self._commands.put(partial(_attempt, future, command))
        return asyncio.wrap_future(future)

    def _run(self) -> None:
        while self._obey():
            self._step()

    def _obey(self) -> bool:
        """Commands, until the engine has something to do and no command waits; False at the end."""
        while not (self._core.busy() and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _abort(self, request_id: str) -> None:
        self._steps.end(request_id)
        self._core.abort(request_id)

    def _admit(self, request: EngineRequest, int_id: int) -> None:
        error = _attempt(Future[None](), partial(self._core.admit, request, int_id)).exception()
        if error is None:
            self._steps.begin(request)
        else:
            self._deliver([(request.request_id, _fault(error))])

    def _step(self) -> None:
        self._step_began_s = time.monotonic()
        step = _attempt(Future[Outputs](), self._core.step)
        self._step_began_s = None
        error = step.exception()
        if error is None:
            self._deliver(self._steps.number(step.result()))
        else:
            self._recover(error)

    def _recover(self, error: BaseException) -> None:
        recovery = _attempt(Future[list[str]](), self._core.recover)
        if recovery.exception() is None:
            self._deliver(self._steps.number([(request_id, _fault(error)) for request_id in recovery.result()]))
        else:
            self._die(f"the engine did not recover from a failed step: {error}")


def _fault(error: BaseException) -> EngineError:
    return (
        error if isinstance(error, EngineError) else EngineFault(FaultReason.STEP, f"{type(error).__name__}: {error}")
    )


def _attempt(future: Future[Result], command: Callable[[], Result]) -> Future[Result]:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(command())
        except Exception as error:  # noqa: BLE001  # Engines raise bare Exceptions; whoever holds the future decides.
            future.set_exception(error)
    return future
