"""vLLM inside this process: fast to start, and a fault in a step costs only the requests in it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from consumers.engines.backend import Outputs
from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import (
    Artifact,
    Delta,
    EngineError,
    EngineFault,
    EngineRequest,
    EngineSettings,
    FaultReason,
    RequestInvalid,
)
from consumers.engines.residents import Listed
from consumers.engines.text import BaseText
from schemas.jobs import Message
from schemas.replies import FinishReason

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def engine_args(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`; nothing is left to a default that could matter."""
    return {
        "model": str(settings.base_dir),
        "load_format": "safetensors",
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "enforce_eager": settings.device == "cpu",
        "max_model_len": settings.context_max,
        "max_num_seqs": settings.rows,
        "block_size": settings.block_tokens if settings.device == "cpu" else None,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": settings.slots,
        "max_cpu_loras": settings.copies_max,
        "max_lora_rank": min(rank for rank in RANKS if rank >= settings.rank_max),
        "worker_extension_cls": "consumers.engines.vllm_worker.SlotReport",
        # The corruption flag travels with the statistics.
        "disable_log_stats": False,
    }


def lora_request(digest: str, int_id: int, path: str) -> "LoRARequest":
    """Name and path select KV, the id selects weights: here all three stand for one digest."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(digest, int_id, path)


def sampling(request: EngineRequest) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=list(request.stop),
        output_kind=RequestOutputKind.DELTA,
    )


def tokens_prompt(request: EngineRequest) -> "TokensPrompt":
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=request.cache_salt)


def delta_of(output: "RequestOutput") -> Delta | EngineError:
    """One output in the protocol's words."""
    completion, metrics = output.outputs[0], output.metrics
    if metrics is not None and metrics.is_corrupted:
        return EngineFault(FaultReason.CORRUPTED, "there was NaN in the logits")
    reason = completion.finish_reason
    if reason is not None and reason not in FINISH_REASONS:
        return EngineFault(FaultReason.STEP, f"vLLM ended the request: {reason}")
    return Delta(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=None if reason is None else FINISH_REASONS[reason],
        cached_tokens=output.num_cached_tokens or 0,
    )


def listed_of(holdings: tuple[list[int], dict[int, int]]) -> Listed:
    slots, host = holdings
    return Listed(slots=frozenset(slots), host=host)


def memory_of(parts: dict[str, int], settings: EngineSettings) -> Memory:
    return Memory(host_is_device=settings.device == "cpu", **parts)


def sizes_of(sizes: tuple[dict[str, int], int]) -> Sizes:
    per_rank, slot_bytes = sizes
    return Sizes(per_rank=per_rank, slot_bytes=slot_bytes)


class VllmCore:
    """Implements `Core` with vLLM's synchronous engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._paths: dict[int, str] = {}
        self._running: set[str] = set()

    def start(self) -> None:
        from vllm import EngineArgs, LLMEngine

        self._text = BaseText(self._settings.base_dir, self._settings.context_max)
        args = EngineArgs(**engine_args(self._settings))
        self._llm: LLMEngine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self._worker("settle_memory", self._settings.memory_bytes)

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._text.encode(prompt)

    def stage(self, artifact: Artifact, int_id: int) -> None:
        self._paths[int_id] = str(artifact.path)
        self._worker("stage_adapter", artifact.digest, int_id, self._paths[int_id])

    def activate(self, int_id: int) -> None:
        self._worker("activate_adapter", int_id)

    def deactivate(self, int_id: int) -> None:
        self._worker("deactivate_adapter", int_id)

    def remove(self, int_id: int) -> None:
        self._llm.remove_lora(int_id)
        self._paths.pop(int_id, None)

    def listed(self) -> Listed:
        return listed_of(self._worker("holdings"))

    def memory(self) -> Memory:
        return memory_of(self._worker("memory"), self._settings)

    def sizes(self) -> Sizes:
        return sizes_of(self._worker("adapter_sizes"))

    def admit(self, request: EngineRequest, int_id: int) -> None:
        from vllm.exceptions import VLLMClientError

        lora = lora_request(request.digest, int_id, self._paths[int_id])
        try:
            self._llm.add_request(request.request_id, tokens_prompt(request), sampling(request), lora_request=lora)
        except (VLLMClientError, ValueError) as error:
            raise RequestInvalid(str(error)) from error
        self._running.add(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running.remove(request_id)
            self._llm.abort_request([request_id])

    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> Outputs:
        outputs = [(output.request_id, delta_of(output)) for output in self._llm.step()]
        for request_id, item in outputs:
            if isinstance(item, Delta) and item.finish_reason is not None:
                self._running.remove(request_id)
        corrupted = [request_id for request_id, item in outputs if isinstance(item, EngineError)]
        if corrupted:
            self._cleanse(corrupted)
        return outputs

    def _cleanse(self, corrupted: list[str]) -> None:
        """The others start their KV over in wiped blocks; their tokens so far stand, the flag is per request."""
        for request_id in corrupted:
            self.abort(request_id)
        self.reset_cache()
        self._worker("wipe_kv")

    def recover(self) -> list[str]:
        """Blocks enter the prefix cache before they are computed: after a step that failed they must not be found."""
        dropped = list(self._running)
        for request_id in dropped:
            self.abort(request_id)
        self.reset_cache()
        return dropped

    def reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def close(self) -> None:
        self._llm.engine_core.shutdown()
        del self._llm

    def _worker(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]
