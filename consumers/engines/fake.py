"""An engine without a model: it sleeps through its steps like a busy accelerator, and can be told to fail."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from zlib import crc32

from consumers.engines.backend import Outputs
from consumers.engines.engine import SlotEngine
from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import (
    Artifact,
    Delta,
    EngineBuild,
    EngineError,
    EngineFault,
    EngineRequest,
    EngineSettings,
    FaultReason,
    RequestInvalid,
)
from consumers.engines.residents import Listed
from consumers.engines.text import Stops, check_prompt
from consumers.engines.thread import ThreadBackend
from schemas.jobs import Message
from schemas.replies import FinishReason

VOCABULARY = 50_000
PREFIXES_MAX = 1024
# What it pretends of memory: an adapter's bytes per rank and module, and a machine.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK_BYTES = 256
MEMORY_BYTES = 64 << 30


def marker(digest: str) -> str:
    """What every answer of the fake engine under this digest begins with."""
    return f"«{digest.removeprefix('sha256:')[:8]}»"


def token_id(word: str) -> int:
    return crc32(word.encode()) % VOCABULARY


@dataclass
class Faults:
    """What a test makes go wrong. All of it may be changed while the engine runs."""

    # Loads of these digests fail and leave their id behind, as vLLM does.
    load_fails: set[str] = field(default_factory=set)
    # Loads of these digests never return.
    load_hangs: set[str] = field(default_factory=set)
    # Removing these digests has no effect.
    remove_fails: set[str] = field(default_factory=set)
    # Requests under these digests end as corrupted.
    corrupts: set[str] = field(default_factory=set)
    # So many of the next steps raise.
    step_errors: int = 0
    # So many bytes are lost to the allocator.
    fragmentation: int = 0
    # A step that raised cannot be recovered from: the engine dies.
    fatal: bool = False
    # Cleared: the next step or hanging load waits until it is set again.
    running: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.running.set()


class Row:
    """One running request."""

    def __init__(self, request: EngineRequest, context_max: int, cached_tokens: int) -> None:
        self.request = request
        self._tokens_max = min(request.max_tokens, context_max - len(request.prompt_ids))
        self._cached_tokens = cached_tokens
        self._stops = Stops(request.stop)
        self._tokens = 0

    def next(self) -> Delta:
        seed = f"s{self.request.seed}" if self.request.seed is not None and self.request.temperature else ""
        word = f" w{self._tokens}{seed}" if self._tokens else marker(self.request.digest)
        self._tokens += 1
        last = self._tokens == self._tokens_max
        text = self._stops.push(word, last)
        reason = FinishReason.STOP if self._stops.met else FinishReason.LENGTH if last else None
        return Delta(text=text, token_ids=(token_id(word),), finish_reason=reason, cached_tokens=self._cached_tokens)


class FakeCore:
    """Answers `«digest» w1 w2 ...` to every prompt, one token a step, `rows` requests at a time."""

    def __init__(self, settings: EngineSettings, faults: Faults) -> None:
        self._settings = settings
        self._faults = faults
        self._digests: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._slots: set[int] = set()
        self._rows: dict[str, Row] = {}
        self._prefixes: dict[tuple[str, str], tuple[int, ...]] = {}

    def start(self) -> None:
        pass

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        turns = [prompt] if isinstance(prompt, str) else [f"{m.role} {m.content}" for m in prompt]
        words = [word for turn in turns for word in turn.split()]
        return check_prompt([token_id(word) for word in words], self._settings.context_max)

    def stage(self, artifact: Artifact, int_id: int) -> None:
        self._digests[int_id] = artifact.digest
        self._bytes[int_id] = self.sizes().predicted(artifact.rank, artifact.target_modules)
        if artifact.digest in self._faults.load_hangs:
            self._faults.running.wait()

    def activate(self, int_id: int) -> None:
        self._slots.add(int_id)
        if self._digests[int_id] in self._faults.load_fails:
            raise ValueError("told to fail")

    def deactivate(self, int_id: int) -> None:
        if self._digests[int_id] not in self._faults.remove_fails:
            self._slots.discard(int_id)

    def remove(self, int_id: int) -> None:
        if self._digests.get(int_id) not in self._faults.remove_fails:
            self._slots.discard(int_id)
            self._bytes.pop(int_id, None)
            self._digests.pop(int_id, None)

    def listed(self) -> Listed:
        return Listed(slots=frozenset(self._slots), host=dict(self._bytes))

    def memory(self) -> Memory:
        slot, held = self.sizes().slot_bytes, sum(self._bytes.values())
        total = slot * self._settings.slots
        return Memory(
            host_is_device=True,
            base_weights=0,
            slots=total,
            slots_used=slot * len(self._slots),
            host_cache=held,
            workspace=0,
            kv_cache=self._settings.kv_bytes,
            fragmentation=self._faults.fragmentation,
            process=total + held + self._settings.kv_bytes + self._faults.fragmentation,
            limit=self._settings.memory_bytes or MEMORY_BYTES,
        )

    def sizes(self) -> Sizes:
        per_rank = dict.fromkeys(MODULES, RANK_BYTES)
        return Sizes(per_rank=per_rank, slot_bytes=self._settings.rank_max * sum(per_rank.values()))

    def admit(self, request: EngineRequest, int_id: int) -> None:
        assert int_id in self._slots
        assert self._digests[int_id] == request.digest
        if max(request.prompt_ids) >= VOCABULARY:
            raise RequestInvalid("the prompt holds a token that the base does not know")
        key = (request.digest, request.cache_salt)
        known = self._prefixes.pop(key, ())
        same = next((i for i, (a, b) in enumerate(zip(known, request.prompt_ids, strict=False)) if a != b), None)
        shared = min(len(known), len(request.prompt_ids) - 1) if same is None else same
        cached = shared - shared % self._settings.block_tokens
        self._prefixes[key] = request.prompt_ids
        if len(self._prefixes) > PREFIXES_MAX:
            del self._prefixes[next(iter(self._prefixes))]
        self._rows[request.request_id] = Row(request, self._settings.context_max, cached)

    def abort(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def busy(self) -> bool:
        return bool(self._rows)

    def step(self) -> Outputs:
        self._faults.running.wait()
        time.sleep(self._settings.fake_step_ms / 1000)
        if self._faults.step_errors:
            self._faults.step_errors -= 1
            raise RuntimeError("told to fail")
        outputs: Outputs = []
        for request_id, row in list(self._rows.items())[: self._settings.rows]:
            output = self._output(row)
            outputs.append((request_id, output))
            if isinstance(output, EngineError) or output.finish_reason is not None:
                del self._rows[request_id]
        return outputs

    def _output(self, row: Row) -> Delta | EngineError:
        if row.request.digest in self._faults.corrupts:
            return EngineFault(FaultReason.CORRUPTED)
        return row.next()

    def recover(self) -> list[str]:
        if self._faults.fatal:
            raise RuntimeError("told to die")
        dropped = list(self._rows)
        self._rows.clear()
        self._prefixes.clear()
        return dropped

    def reset_cache(self) -> None:
        self._prefixes.clear()

    def close(self) -> None:
        self._rows.clear()


class FakeEngine(SlotEngine):
    """The fake behind the protocol, with its faults in reach of a test."""

    def __init__(self, build: EngineBuild, settings: EngineSettings, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        super().__init__(ThreadBackend(FakeCore(settings, self.faults)), build, settings)
