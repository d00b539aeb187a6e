"""Transformers and PEFT as an engine: rows of a batch under different adapters. The reference, and a fallback.

Newcomers are prefilled together in a step of their own and join the batch; then all rows decode together. Prefixes are
not cached. For models with full attention only. `Any` stands for torch tensors and the library's models: `make check`
does not install them.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, DynamicCache

from consumers.engines.backend import Outputs
from consumers.engines.memory import Memory, Sizes, available_bytes, free_in_allocator, give_back, resident_bytes
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
from consumers.engines.text import BaseText, Stops
from schemas.jobs import Message
from schemas.replies import FinishReason

# PEFT wants one adapter to exist from the start. No row ever runs under it.
SCAFFOLD = "scaffold"


class Row:
    """One running request."""

    def __init__(self, request: EngineRequest, adapter: str, tokens_max: int) -> None:
        self.request = request
        self.adapter = adapter
        self.last_token = 0
        self._tokens_left = tokens_max
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = Stops(request.stop)
        self._random = torch.Generator()
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)

    def next(self, logits: Any, text: BaseText, ends: frozenset[int]) -> Delta | EngineError:
        if not torch.isfinite(logits).all():
            return EngineFault(FaultReason.CORRUPTED, "there was NaN in the logits")
        self.last_token = self._sample(logits)
        self._tokens_left -= 1
        ended = self.last_token in ends
        shown = self._stops.push(
            "" if ended else self._decoder.step(text.tokenizer.backend_tokenizer, self.last_token) or "",
            last=ended or not self._tokens_left,
        )
        stopped = ended or self._stops.met
        reason = FinishReason.STOP if stopped else None if self._tokens_left else FinishReason.LENGTH
        return Delta(text=shown, token_ids=(self.last_token,), finish_reason=reason)

    def _sample(self, logits: Any) -> int:
        if not self.request.temperature:
            return int(logits.argmax())
        chances, order = (logits / self.request.temperature).softmax(-1).sort(descending=True)
        # The smallest set of tokens that reaches top_p; the first always belongs to it.
        chances[chances.cumsum(-1) - chances >= self.request.top_p] = 0.0
        return int(order[torch.multinomial(chances.cpu(), 1, generator=self._random)])


class Batch:
    """Rows that decode together: left-padded, with the KV and the mask of what each has seen."""

    def __init__(self, rows: list[Row], cache: Any, mask: Any) -> None:
        self.rows = rows
        self.cache = cache
        self.mask = mask

    def join(self, other: "Batch") -> None:
        width = max(self.mask.shape[1], other.mask.shape[1])
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_widen(mine.keys, width, -2), _widen(theirs.keys, width, -2)])
            mine.values = torch.cat([_widen(mine.values, width, -2), _widen(theirs.values, width, -2)])
        self.mask = torch.cat([_widen(self.mask, width, -1), _widen(other.mask, width, -1)])
        self.rows = self.rows + other.rows

    def keep(self, rows: list[Row]) -> None:
        """Drop the other rows, and the padding that only they needed."""
        indices = [self.rows.index(row) for row in rows]
        mask = self.mask[indices]
        padding = int((mask.sum(0) > 0).int().argmax())
        for layer in self.cache.layers:
            layer.keys = layer.keys[indices][:, :, padding:]
            layer.values = layer.values[indices][:, :, padding:]
        self.rows, self.mask = rows, mask[:, padding:]


class PeftCore:
    """Implements `Core`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._slots: set[int] = set()

    def start(self) -> None:
        settings = self._settings
        self._text = BaseText(settings.base_dir, settings.context_max)
        base = AutoModelForCausalLM.from_pretrained(
            settings.base_dir,
            dtype=settings.dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        ends = base.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        scaffold = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM", inference_mode=True)
        self._base_bytes = sum(weight.nbytes for weight in (*base.parameters(), *base.buffers()))
        self._model: Any = get_peft_model(base, scaffold, SCAFFOLD).to(settings.device).eval()
        give_back()
        self._limit_bytes = settings.memory_bytes or resident_bytes() + available_bytes()
        self._workspace_bytes = max(0, resident_bytes() - free_in_allocator() - self._base_bytes)

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        return self._text.encode(prompt)

    def stage(self, artifact: Artifact, int_id: int) -> None:
        if artifact.rank > self._settings.rank_max:
            raise ValueError(f"rank {artifact.rank} is above {self._settings.rank_max}")
        if not (artifact.path / "adapter_model.safetensors").is_file():
            raise FileNotFoundError("adapter_model.safetensors")
        name = _name(int_id)
        found = self._model.load_adapter(str(artifact.path), name, torch_device=self._settings.device)
        # PEFT only warns here, and would serve an adapter that is partly random or partly ignored.
        if found.unexpected_keys or any(f".{name}." in key for key in found.missing_keys):
            raise ValueError("the weights do not match the configuration")

    def activate(self, int_id: int) -> None:
        """Weights are used from where they are: a slot is the right to be used."""
        if _name(int_id) not in self._model.peft_config:
            raise KeyError(int_id)
        self._slots.add(int_id)

    def deactivate(self, int_id: int) -> None:
        self._slots.discard(int_id)

    def remove(self, int_id: int) -> None:
        self._slots.discard(int_id)
        if _name(int_id) in self._model.peft_config:
            self._model.delete_adapter(_name(int_id))

    def listed(self) -> Listed:
        host = dict.fromkeys((name for name in self._model.peft_config if name != SCAFFOLD), 0)
        for _, name, size in self._weights():
            if name in host:
                host[name] += size
        return Listed(
            slots=frozenset(self._slots), host={int(name.removeprefix("slot")): size for name, size in host.items()}
        )

    def memory(self) -> Memory:
        host = sum(self.listed().host.values())
        return Memory(
            host_is_device=self._settings.device == "cpu",
            base_weights=self._base_bytes,
            slots=0,
            slots_used=0,
            host_cache=host,
            workspace=self._workspace_bytes,
            kv_cache=self._kv_bytes(),
            fragmentation=free_in_allocator(),
            process=resident_bytes(),
            limit=self._limit_bytes,
        )

    def sizes(self) -> Sizes:
        """The scaffold has rank 1 and every module: its weights are the table."""
        per_rank: Counter[str] = Counter()
        for module, name, size in self._weights():
            if name == SCAFFOLD:
                per_rank[module] += size
        return Sizes(per_rank=per_rank)

    def _weights(self) -> Iterator[tuple[str, str, int]]:
        """Module, adapter and bytes of everything that adapters have, in one walk: `…q_proj.lora_A.slot3.weight`."""
        for key, weight in self._model.named_parameters():
            module, found, rest = key.partition(".lora_")
            if found:
                yield module.rpartition(".")[2], rest.split(".")[1], weight.nbytes

    def _kv_bytes(self) -> int:
        layers = self._batch.cache.layers if self._batch else []
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def admit(self, request: EngineRequest, int_id: int) -> None:
        room = self._settings.context_max - len(request.prompt_ids)
        if room < 1 or not all(0 <= token < self._model.config.vocab_size for token in request.prompt_ids):
            raise RequestInvalid("the prompt is too long or holds a token that the base does not know")
        self._waiting.append(Row(request, _name(int_id), min(request.max_tokens, room)))

    def abort(self, request_id: str) -> None:
        self._waiting = deque(row for row in self._waiting if row.request.request_id != request_id)
        self._drop({request_id})

    def busy(self) -> bool:
        return bool(self._waiting or self._batch)

    def step(self) -> Outputs:
        running = len(self._batch.rows) if self._batch else 0
        joining = list(self._waiting)[: self._settings.rows - running]
        with torch.inference_mode():
            outputs = self._prefill(joining) if joining else self._decode()
        self._drop({request_id for request_id, item in outputs if isinstance(item, EngineError) or item.finish_reason})
        return outputs

    def recover(self) -> list[str]:
        rows = {row.request.request_id for row in [*self._waiting, *(self._batch.rows if self._batch else [])]}
        self._waiting.clear()
        self._batch = None
        return list(rows)

    def reset_cache(self) -> None:
        """There is none."""

    def close(self) -> None:
        self.recover()
        del self._model

    def _prefill(self, rows: list[Row]) -> Outputs:
        width = max(len(row.request.prompt_ids) for row in rows)
        prompts = [[0] * (width - len(row.request.prompt_ids)) + list(row.request.prompt_ids) for row in rows]
        mask = [[int(at >= width - len(row.request.prompt_ids)) for at in range(width)] for row in rows]
        joining = Batch(rows, DynamicCache(), torch.tensor(mask, device=self._settings.device))
        outputs = self._forward(joining, prompts)
        for _ in rows:
            self._waiting.popleft()
        if self._batch:
            self._batch.join(joining)
        else:
            self._batch = joining
        return outputs

    def _decode(self) -> Outputs:
        assert self._batch is not None
        self._batch.mask = torch.nn.functional.pad(self._batch.mask, (0, 1), value=1)
        return self._forward(self._batch, [[row.last_token] for row in self._batch.rows])

    def _forward(self, batch: Batch, tokens: list[list[int]]) -> Outputs:
        ids = torch.tensor(tokens, device=self._settings.device)
        positions = (batch.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found = self._model(
            input_ids=ids,
            attention_mask=batch.mask,
            position_ids=positions,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
            adapter_names=[row.adapter for row in batch.rows],
        )
        logits = found.logits[:, -1].float()
        return [
            (row.request.request_id, row.next(logits[at], self._text, self._ends)) for at, row in enumerate(batch.rows)
        ]

    def _drop(self, request_ids: set[str]) -> None:
        if self._batch is None:
            return
        rows = [row for row in self._batch.rows if row.request.request_id not in request_ids]
        if not rows:
            self._batch = None
        elif len(rows) < len(self._batch.rows):
            self._batch.keep(rows)


def _name(int_id: int) -> str:
    """Not the bare number: the names of weights hold layer numbers, too."""
    return f"slot{int_id}"


def _widen(tensor: Any, width: int, dim: int) -> Any:
    """Pad at the front of a dimension."""
    missing = width - tensor.shape[dim]
    return torch.nn.functional.pad(tensor, (0, 0) * (-1 - dim) + (missing, 0))
