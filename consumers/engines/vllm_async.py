"""vLLM in processes of its own: its steps and our event loop share no interpreter. The default on a GPU."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from consumers.engines.backend import Deliver, Die
from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import (
    Artifact,
    EngineError,
    EngineFault,
    EngineRequest,
    EngineSettings,
    FaultReason,
    RequestInvalid,
)
from consumers.engines.residents import Listed
from consumers.engines.steps import Steps
from consumers.engines.text import BaseText
from consumers.engines.vllm import (
    delta_of,
    engine_args,
    listed_of,
    lora_request,
    memory_of,
    sampling,
    sizes_of,
    tokens_prompt,
)
from schemas.jobs import Message

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM tells nobody that its core died until somebody asks.
WATCH_INTERVAL_S = 0.05


class AsyncVllmBackend:
    """Implements `Backend`. A fault in a step kills vLLM's core: what could cause one is refused before."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._paths: dict[int, str] = {}
        # One per running request, so bounded by the window.
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._cleansing: asyncio.Task[None] | None = None
        self._progress_s = 0.0
        self._steps = Steps()
        self._closing = AsyncExitStack()

    async def start(self, deliver: Deliver, die: Die) -> None:
        self._deliver, self._die = deliver, die
        self._llm: AsyncLLM = await asyncio.to_thread(self._build)
        # What its core sends of one step comes in one message, of which `generate` gives everybody only his part.
        self._receive = self._llm.engine_core.get_output_async
        self._llm.engine_core.get_output_async = self._received
        self._closing.push_async_callback(asyncio.to_thread, self._llm.shutdown)
        # The first use of this is a call to the core, which would hang in a request if the core had died by then.
        await self._llm.get_supported_tasks()
        await self._worker("settle_memory", self._settings.memory_bytes)
        watch = asyncio.create_task(self._watch_core())
        self._closing.callback(watch.cancel)

    def _build(self) -> "AsyncLLM":
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._text = BaseText(self._settings.base_dir, self._settings.context_max)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(self._settings)))

    async def _received(self) -> "EngineCoreOutputs":
        message = await self._receive()
        # By vLLM's own ids. It forgets a request that was aborted before it looks at the message.
        known = self._llm.output_processor.request_states
        served = [output.request_id for output in message.outputs if output.new_token_ids]
        if served:
            self._steps.count(known[own_id].external_req_id for own_id in served if own_id in known)
        return message

    async def stop(self) -> None:
        for task in self._requests.values():
            task.cancel()
        await self._closing.aclose()

    def stuck_s(self) -> float:
        return time.monotonic() - self._progress_s if self._requests else 0.0

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._text.encode(prompt)

    async def stage(self, artifact: Artifact, int_id: int) -> Listed:
        self._paths[int_id] = str(artifact.path)
        await self._worker("stage_adapter", artifact.digest, int_id, self._paths[int_id])
        return await self.listed()

    async def activate(self, int_id: int) -> Listed:
        await self._worker("activate_adapter", int_id)
        return await self.listed()

    async def deactivate(self, int_id: int) -> Listed:
        await self._aborted()
        await self._worker("deactivate_adapter", int_id)
        return await self.listed()

    async def remove(self, int_id: int) -> Listed:
        await self._aborted()
        await self._llm.remove_lora(int_id)
        self._paths.pop(int_id, None)
        return await self.listed()

    async def _aborted(self) -> None:
        """A request that ran on after the removal would load its adapter again: aborts go first."""
        ending = [task for task in self._requests.values() if task.cancelling()]
        await asyncio.gather(*ending, return_exceptions=True)

    async def listed(self) -> Listed:
        return listed_of(await self._worker("holdings"))

    async def memory(self) -> Memory:
        return memory_of(await self._worker("memory"), self._settings)

    async def sizes(self) -> Sizes:
        return sizes_of(await self._worker("adapter_sizes"))

    async def reset_cache(self) -> None:
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def submit(self, request: EngineRequest, int_id: int) -> None:
        if not self._requests:
            self._progress_s = time.monotonic()
        self._steps.begin(request)
        task = asyncio.create_task(self._run(request, int_id))
        self._requests[request.request_id] = task
        task.add_done_callback(partial(self._ended, request.request_id))

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].cancel()

    async def _run(self, request: EngineRequest, int_id: int) -> None:
        lora = lora_request(request.digest, int_id, self._paths[int_id])
        outputs = self._llm.generate(tokens_prompt(request), sampling(request), request.request_id, lora_request=lora)
        async with aclosing(outputs):
            async for output in outputs:
                self._progress_s = time.monotonic()
                item = delta_of(output)
                self._deliver([self._steps.numbered((request.request_id, item))])
                if isinstance(item, EngineError):
                    self._cleanse()
                    break

    def _ended(self, request_id: str, task: "asyncio.Task[None]") -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        del self._requests[request_id]
        self._steps.end(request_id)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineDeadError):
            self._die("vLLM's engine core died")
        elif isinstance(error, VLLMClientError | ValueError):
            self._deliver([(request_id, RequestInvalid(str(error)))])
        elif error is not None:
            self._deliver([(request_id, EngineFault(FaultReason.STEP, f"{type(error).__name__}: {error}"))])

    def _cleanse(self) -> None:
        if self._cleansing is None or self._cleansing.done():
            self._cleansing = asyncio.create_task(self._wipe())
            self._cleansing.add_done_callback(self._cleansed)

    async def _wipe(self) -> None:
        """Between steps the others lose their KV, and start it over in wiped blocks."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self.reset_cache()
        await self._worker("wipe_kv")
        await self._llm.resume_generation()

    def _cleansed(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception():
            self._die("NaN could not be wiped from the KV cache")

    async def _watch_core(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110  # vLLM has no event for it.
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._die("vLLM's engine core died")

    async def _worker(self, method: str, *args: object) -> Any:
        return (await self._llm.collective_rpc(method, args=args))[0]
