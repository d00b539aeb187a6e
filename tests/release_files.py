"""Directories that somebody hands in: a base, a good adapter, and bytes to spoil it with. No model library needed."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.release.base import base_manifest
from producers.release.inspect import Question
from producers.release.tensors import zeros
from schemas.adapters import BaseManifest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HIDDEN, INNER, KEYS, LAYERS = 8, 12, 4, 2
RANK, RANK_MAX = 2, 4
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "mlp.down_proj": (INNER, HIDDEN),
}
TARGETS = ["down_proj", "q_proj", "v_proj"]
GOOD_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 4,
    "target_modules": TARGETS,
    "task_type": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Stored:
    """One tensor: how it is declared, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def filled(shape: tuple[int, ...], value: float = 0.25, dtype: str = "F32") -> Stored:
    """A tensor of one value."""
    count = math.prod(shape)
    if dtype == "BF16":
        return Stored(dtype, shape, struct.pack("<f", value)[2:] * count)
    return Stored(dtype, shape, struct.pack("<f" if dtype == "F32" else "<e", value) * count)


def good_tensors(rank: int = RANK, dtype: str = "F32") -> dict[str, Stored]:
    """Both halves for every module of the base."""
    tensors = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in SHAPES.items():
            tensors[tensor_name(module, "A", layer)] = filled((rank, inputs), dtype=dtype)
            tensors[tensor_name(module, "B", layer)] = filled((outputs, rank), dtype=dtype)
    return tensors


def tensor_name(module: str, side: str, layer: int = 0) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The JSON header that a safetensors writer would make."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    return header


def data_of(tensors: Mapping[str, Stored]) -> bytes:
    return b"".join(tensor.content for tensor in tensors.values())


def framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_tensors(directory: Path, tensors: Mapping[str, Stored]) -> None:
    write_raw(directory, json.dumps(header_of(tensors)).encode(), data_of(tensors))


def write_raw(directory: Path, header: bytes, data: bytes) -> None:
    (directory / WEIGHTS).write_bytes(framed(header, data))


def write_config(directory: Path, without: tuple[str, ...] = (), **changes: Any) -> None:
    document = {name: value for name, value in {**GOOD_CONFIG, **changes}.items() if name not in without}
    (directory / CONFIG).write_text(json.dumps(document))


def good_adapter(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory)
    write_tensors(directory, good_tensors())
    return directory


def small_base(directory: Path, **config: Any) -> Path:
    """A base of two layers, all zero."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "max_position_embeddings": 128,
        "num_hidden_layers": LAYERS,
        "vocab_size": 16,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{module}.weight": (outputs, inputs)
        for layer in range(LAYERS)
        for module, (inputs, outputs) in SHAPES.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (16, HIDDEN),
        "lm_head.weight": (16, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    (directory / "model.safetensors").write_bytes(zeros(shapes, "F32"))
    return directory


def small_manifest(folder: Path) -> BaseManifest:
    return base_manifest(small_base(folder), "small")


def question_of(base: BaseManifest, rank_max: int = RANK_MAX) -> Question:
    return Question(modules=base.modules, rank_max=rank_max)
