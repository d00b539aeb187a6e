"""The engine a worker sees: a table of slots, a stream per request and one way to die, over any backend."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from consumers.engines.backend import Backend, Outputs
from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import (
    Artifact,
    Delta,
    EngineBuild,
    EngineDead,
    EngineError,
    EngineRequest,
    EngineSettings,
    HostFull,
    Loaded,
    LoadFailed,
    RequestInvalid,
    Staged,
)
from consumers.engines.residents import Listed, Residents
from schemas.audit import LoadSource
from schemas.jobs import Message

Result = TypeVar("Result")
# A stream holds at most one entry per token, and the context bounds the tokens. `None` says: aborted.
Stream = asyncio.Queue[Delta | EngineError | None]
STOP_TIMEOUT_S = 10.0


class CommandFailed(EngineError):
    """The engine raised."""


class SlotEngine:
    """Implements `Engine`. Lives on the event loop."""

    def __init__(self, backend: Backend, build: EngineBuild, settings: EngineSettings) -> None:
        self._backend = backend
        self._build = build
        self._settings = settings
        self._residents = Residents(settings)
        self._streams: dict[str, Stream] = {}
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Future[Any]] = set()
        self._sizes = Sizes()
        # Bytes set aside for the copy that is being made.
        self._staging = 0
        # Why the engine serves nobody, once it does not.
        self._died: asyncio.Future[str] | None = None

    @property
    def build(self) -> EngineBuild:
        return self._build

    async def start(self) -> None:
        self._died = asyncio.get_running_loop().create_future()
        try:
            await self._call(self._backend.start(self._deliver, self._die), self._settings.start_timeout_s)
            self._expect(await self._call(self._backend.listed()))
            self._sizes = await self._call(self._backend.sizes())
        except CommandFailed as error:
            raise self._die(f"the engine did not start: {error}") from error

    async def stop(self) -> None:
        self._die("the engine was stopped")
        stopping = asyncio.ensure_future(self._backend.stop())
        await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
        stopping.cancel()

    def healthy(self) -> bool:
        alive = self._died is not None and not self._died.done()
        return alive and self._backend.stuck_s() <= self._settings.step_timeout_s

    async def stage(self, artifact: Artifact) -> Staged:
        return await self._change(partial(self._stage, artifact))

    async def unstage(self, digest: str) -> None:
        await self._change(partial(self._unstage, digest))

    async def load(self, artifact: Artifact) -> Loaded:
        return await self._change(partial(self._load, artifact))

    async def unload(self, digest: str, keep: bool = False) -> None:
        await self._change(partial(self._unload, digest, keep))

    async def reset_cache(self) -> None:
        await self._change(self._reset_cache)

    def resident(self) -> frozenset[str]:
        return self._residents.digests

    def staged(self) -> frozenset[str]:
        return self._residents.staged

    async def memory(self) -> Memory:
        self._alive()
        try:
            measured = await self._call(self._backend.memory())
        except CommandFailed as error:
            raise self._die(f"the memory could not be measured: {error}") from error
        return replace(measured, staging=self._staging)

    @property
    def sizes(self) -> Sizes:
        return self._sizes

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._backend.encode(prompt)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        self._alive()
        if request.request_id in self._streams:
            raise RequestInvalid("a request with this id is running")
        int_id = self._residents.enter(request.digest)
        stream = self._streams[request.request_id] = Stream()
        self._backend.submit(request, int_id)
        finished = False
        try:
            while not finished and (item := await stream.get()) is not None:
                if isinstance(item, EngineError):
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self._backend.abort(request.request_id)
            del self._streams[request.request_id]
            self._residents.leave(request.digest)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._streams[request_id].put_nowait(None)

    async def _change(self, change: Callable[[], Awaitable[Result]]) -> Result:
        """One change at a time, each to its end: a caller that is cancelled leaves no half-loaded adapter behind."""
        task = asyncio.ensure_future(self._alone(change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _alone(self, change: Callable[[], Awaitable[Result]]) -> Result:
        async with self._changing:
            self._alive()
            return await change()

    async def _stage(self, artifact: Artifact) -> Staged:
        digest = artifact.digest
        if digest in self._residents.staged:
            return Staged(duration_ms=0.0, bytes=self._residents.bytes_of(digest))
        expected = self._sizes.predicted(artifact.rank, artifact.target_modules)
        int_id = self._residents.fresh_id(artifact, expected)
        began_s = time.monotonic()
        self._staging = expected
        try:
            listed = await self._call(self._backend.stage(artifact, int_id))
            size = listed.host.get(int_id, 0)
            self._sizes.learn(artifact.rank, artifact.target_modules, size)
            self._residents.expect_room(size)
            self._residents.stage(digest, int_id, size)
            self._expect(listed)
        except (CommandFailed, HostFull) as error:
            await self._drop(digest, int_id)
            if isinstance(error, HostFull):
                raise
            raise LoadFailed(f"{digest} could not be loaded: {error}") from error
        finally:
            self._staging = 0
        return Staged(duration_ms=_since_ms(began_s), bytes=size)

    async def _unstage(self, digest: str) -> None:
        if digest in self._residents.staged:
            await self._remove(self._residents.unstage(digest))

    async def _load(self, artifact: Artifact) -> Loaded:
        digest, source = artifact.digest, LoadSource.HOST
        if digest in self._residents.digests:
            return Loaded(duration_ms=0.0, bytes=self._residents.bytes_of(digest), source=source)
        self._residents.expect_free_slot()
        began_s = time.monotonic()
        if digest not in self._residents.staged:
            await self._stage(artifact)
            source = LoadSource.STORE
        size, int_id = self._residents.bytes_of(digest), self._residents.id_of(digest)
        try:
            listed = await self._call(self._backend.activate(int_id))
            # From here on requests may enter; nothing runs between this line and the next.
            self._residents.fill_slot(digest)
            self._expect(listed)
        except CommandFailed as error:
            await self._drop(digest, int_id)
            raise LoadFailed(f"{digest} could not be loaded: {error}") from error
        return Loaded(duration_ms=_since_ms(began_s), bytes=size, source=source)

    async def _unload(self, digest: str, keep: bool) -> None:
        if digest not in self._residents.digests:
            return
        int_id = self._residents.clear_slot(digest)
        if not keep:
            await self._remove(self._residents.unstage(digest))
            return
        try:
            self._expect(await self._call(self._backend.deactivate(int_id)))
        except CommandFailed as error:
            raise self._die(f"an adapter could not be taken from its slot: {error}") from error

    async def _drop(self, digest: str, int_id: int) -> None:
        """After a failure: nothing of the adapter stays, in the table or in the engine."""
        if digest in self._residents.digests:
            self._residents.clear_slot(digest)
        if digest in self._residents.staged:
            self._residents.unstage(digest)
        await self._remove(int_id)

    async def _remove(self, int_id: int) -> None:
        try:
            self._expect(await self._call(self._backend.remove(int_id)))
        except CommandFailed as error:
            raise self._die(f"an adapter could not be removed: {error}") from error

    async def _reset_cache(self) -> None:
        try:
            await self._call(self._backend.reset_cache())
        except CommandFailed as error:
            raise self._die(f"the cache could not be reset: {error}") from error

    def _expect(self, listed: Listed) -> None:
        """The engine holds what our table says, copy by copy and slot by slot."""
        expected = self._residents.listed
        if listed != expected:
            raise CommandFailed(f"the engine lists {listed} where it should list {expected}")

    async def _call(self, command: Awaitable[Result], timeout_s: float | None = None) -> Result:
        """Wait for the backend, but no longer than allowed: a call in flight when vLLM's core dies never returns."""
        timeout_s = timeout_s or self._settings.utility_timeout_s
        call = asyncio.ensure_future(command)
        waits: set[asyncio.Future[Any]] = {call, self._alive()}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            raise self._die(f"a call did not return within {timeout_s:g} s")
        error = call.exception()
        if error is not None:
            raise CommandFailed(f"{type(error).__name__}: {error}") from error
        return call.result()

    def _alive(self) -> "asyncio.Future[str]":
        if self._died is None:
            raise EngineDead("the engine was not started")
        if self._died.done():
            raise EngineDead(self._died.result())
        return self._died

    def _deliver(self, outputs: Outputs) -> None:
        for request_id, item in outputs:
            if request_id in self._streams:
                self._streams[request_id].put_nowait(item)

    def _die(self, message: str) -> EngineDead:
        """Only the first cause counts."""
        if self._died is not None and not self._died.done():
            self._died.set_result(message)
            self._deliver([(request_id, EngineDead(message)) for request_id in self._streams])
        return EngineDead(self._died.result() if self._died else message)


def _since_ms(began_s: float) -> float:
    return (time.monotonic() - began_s) * 1000
