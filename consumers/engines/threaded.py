"""An engine made of a synchronous core on its own thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from consumers.engines.protocol import (
    Artifact,
    Delta,
    EngineBuild,
    EngineDead,
    EngineError,
    EngineFault,
    EngineRequest,
    EngineSettings,
    FaultReason,
    Loaded,
    LoadFailed,
    RequestInvalid,
)
from consumers.engines.residents import Residents
from consumers.engines.thread import Core, EngineThread, StepOutputs
from schemas.jobs import Message

Result = TypeVar("Result")
# A stream holds at most one entry per token, and tokens are bounded by the context. `None` says: aborted.
Stream = asyncio.Queue[Delta | EngineError | None]
CLOSE_TIMEOUT_S = 10.0


class CommandFailed(EngineError):
    """The engine raised."""


class ThreadedEngine:
    """Implements `Engine`. Everything but the core lives on the event loop; the two meet in one queue of commands."""

    def __init__(self, core: Core, build: EngineBuild, settings: EngineSettings) -> None:
        self._core = core
        self._build = build
        self._settings = settings
        self._residents = Residents(settings.slots)
        self._streams: dict[str, Stream] = {}
        self._changes = asyncio.Lock()
        self._thread = EngineThread(core, self._stepped)
        self._dead: str | None = "not started"

    @property
    def build(self) -> EngineBuild:
        return self._build

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._death = self._loop.create_future()
        self._dead = None
        self._thread.start()
        try:
            await self._call(self._core.start, self._settings.start_timeout_s)
            await self._call(partial(self._expect_listed, frozenset()))
        except CommandFailed as error:
            raise self._die(f"the engine did not start: {error}") from error

    async def stop(self) -> None:
        if not self._thread.alive():
            return
        stuck = self._dead is not None or not self.healthy()
        self._die("the engine was stopped")
        closing = asyncio.wrap_future(self._thread.call(self._core.close))
        self._thread.finish()
        if not stuck:
            await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)

    def healthy(self) -> bool:
        stuck = self._thread.step_age_s() > self._settings.step_timeout_s
        return self._dead is None and self._thread.alive() and not stuck

    async def load(self, artifact: Artifact) -> Loaded:
        async with self._changes:
            if artifact.digest in self._residents:
                return Loaded(duration_ms=0.0, bytes=artifact.bytes)
            int_id = self._residents.fresh_id(artifact)
            began_s = time.monotonic()
            try:
                size = await self._call(partial(self._add, artifact, int_id, self._residents.ids | {int_id}))
            except asyncio.CancelledError:
                self._thread.call(partial(self._core.remove, int_id))
                raise
            except CommandFailed as error:
                await self._remove(int_id)
                raise LoadFailed(f"{artifact.digest} could not be loaded: {error}") from error
            self._residents.add(artifact.digest, int_id)
            return Loaded(duration_ms=(time.monotonic() - began_s) * 1000, bytes=size)

    async def unload(self, digest: str) -> None:
        async with self._changes:
            self._check_alive()
            if digest in self._residents:
                await self._remove(self._residents.remove(digest))

    def resident(self) -> frozenset[str]:
        return self._residents.digests

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._core.encode(prompt)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        self._check_alive()
        if request.request_id in self._streams:
            raise RequestInvalid("a request with this id is running")
        int_id = self._residents.enter(request.digest)
        stream = self._streams[request.request_id] = Stream()
        admitted = self._thread.call(partial(self._core.admit, request, int_id))
        admitted.add_done_callback(partial(self._admitted, request.request_id))
        finished = False
        try:
            while not finished and (item := await stream.get()) is not None:
                if isinstance(item, EngineError):
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            del self._streams[request.request_id]
            # The abort goes into the queue before any later unload of this digest can.
            if not finished:
                self._thread.call(partial(self._core.abort, request.request_id))
            self._residents.leave(request.digest)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._streams[request_id].put_nowait(None)

    async def reset_cache(self) -> None:
        async with self._changes:
            try:
                await self._call(self._core.reset_cache)
            except CommandFailed as error:
                raise self._die(f"the cache could not be reset: {error}") from error

    def _add(self, artifact: Artifact, int_id: int, expected: frozenset[int]) -> int:
        size = self._core.add(artifact, int_id)
        self._expect_listed(expected)
        return size

    async def _remove(self, int_id: int) -> None:
        try:
            await self._call(partial(self._core.remove, int_id))
            await self._call(partial(self._expect_listed, self._residents.ids))
        except CommandFailed as error:
            raise self._die(f"an adapter could not be removed: {error}") from error

    def _expect_listed(self, expected: frozenset[int]) -> None:
        listed = self._core.listed()
        if listed != expected:
            raise CommandFailed(f"the engine lists {sorted(listed)} where it should list {sorted(expected)}")

    async def _call(self, command: Callable[[], Result], timeout_s: float | None = None) -> Result:
        """Run a command on the thread. A command that does not come back means that the engine is dead."""
        self._check_alive()
        future = asyncio.wrap_future(self._thread.call(command))
        timeout_s = timeout_s or self._settings.utility_timeout_s
        await asyncio.wait({future, self._death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise self._die(self._dead or f"a command did not return within {timeout_s:g} s")
        error = future.exception()
        if error is not None:
            raise CommandFailed(f"{type(error).__name__}: {error}") from error
        return future.result()

    def _admitted(self, request_id: str, admitted: Future[None]) -> None:
        """On the thread."""
        error = admitted.exception()
        if error is not None:
            faults: StepOutputs = [(request_id, error if isinstance(error, EngineError) else _fault(error))]
            self._loop.call_soon_threadsafe(self._deliver, faults)

    def _stepped(self, step: Future[StepOutputs], recovery: Future[list[str]] | None) -> None:
        """On the thread."""
        error = step.exception()
        if error is None:
            self._loop.call_soon_threadsafe(self._deliver, step.result())
        elif recovery is not None and recovery.exception() is None:
            faults: StepOutputs = [(request_id, _fault(error)) for request_id in recovery.result()]
            self._loop.call_soon_threadsafe(self._deliver, faults)
        else:
            self._loop.call_soon_threadsafe(self._die, f"the engine did not recover from a failed step: {error}")

    def _deliver(self, outputs: Sequence[tuple[str, Delta | EngineError]]) -> None:
        for request_id, item in outputs:
            if request_id in self._streams:
                self._streams[request_id].put_nowait(item)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _die(self, message: str) -> EngineDead:
        if self._dead is None:
            self._dead = message
            self._death.set_result(None)
            self._deliver([(request_id, EngineDead(message)) for request_id in self._streams])
        return EngineDead(self._dead)


def _fault(error: BaseException) -> EngineFault:
    return EngineFault(FaultReason.STEP, f"{type(error).__name__}: {error}")
