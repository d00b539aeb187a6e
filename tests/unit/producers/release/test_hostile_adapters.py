"""The corpus: every kind of bad adapter is refused with a sentence that names the tensor, field or file.

Each case spoils one thing of a good adapter. What is refused here was taken by some engine, parser or library.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import listing
from producers.release.inspect import inspect
from producers.release.scan import listing_problems
from tests.release_files import (
    CONFIG,
    HIDDEN,
    RANK,
    TARGETS,
    WEIGHTS,
    Stored,
    data_of,
    filled,
    good_adapter,
    good_tensors,
    header_of,
    question_of,
    small_manifest,
    tensor_name,
    write_config,
    write_raw,
    write_tensors,
)

Q_A = tensor_name("self_attn.q_proj", "A")
Q_B = tensor_name("self_attn.q_proj", "B")
V_A = tensor_name("self_attn.v_proj", "A")
Spoil = Callable[[Path], object]
Case = tuple[Spoil, str]


class Payload:
    """What a pickle of it would do if anybody opened it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/switchyard-was-here"),))


def problems_of(directory: Path, base_folder: Path) -> list[str]:
    found = list(listing_problems(listing(directory)))
    return found or list(inspect(directory, question_of(small_manifest(base_folder))).problems)


def put(name: str, content: bytes = b"x") -> Spoil:
    return lambda d: (d / name).write_bytes(content)


def config(**changes: Any) -> Spoil:
    return lambda d: write_config(d, **changes)


def raw_config(content: bytes) -> Spoil:
    return put(CONFIG, content)


def without(*fields: str) -> Spoil:
    return lambda d: write_config(d, without=fields)


def weights(content: bytes) -> Spoil:
    return put(WEIGHTS, content)


def tensors(**changes: Stored | None) -> Spoil:
    """Replace, add or (None) leave out tensors."""
    return lambda d: write_tensors(
        d, {name: found for name, found in {**good_tensors(), **changes}.items() if found is not None}
    )


def header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Change the JSON header and keep the data."""

    def spoil(directory: Path) -> None:
        good = good_tensors()
        document = header_of(good)
        change(document)
        write_raw(directory, json.dumps(document).encode(), data_of(good))

    return spoil


def header_text(change: Callable[[bytes], bytes]) -> Spoil:
    good = good_tensors()
    return lambda d: write_raw(d, change(json.dumps(header_of(good)).encode()), data_of(good))


def linked(name: str) -> Spoil:
    def spoil(directory: Path) -> None:
        (directory / name).rename(directory.parent / "elsewhere")
        (directory / name).symlink_to(directory.parent / "elsewhere")

    return spoil


def emptied(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def zipped(directory: Path) -> None:
    with zipfile.ZipFile(directory / WEIGHTS, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Payload()))


def set_field(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document[name].update({field: value})


FILES: dict[str, Case] = {
    "weights missing": (lambda d: (d / WEIGHTS).unlink(), f"file '{WEIGHTS}': it is missing"),
    "config missing": (lambda d: (d / CONFIG).unlink(), f"file '{CONFIG}': it is missing"),
    "directory empty": (emptied, f"file '{CONFIG}': it is missing"),
    "pickle by name": (put("adapter_model.bin"), "adapter_model.bin': pickled weights are never opened"),
    "pickle by odd name": (put("weights.PT"), "weights.PT': pickled weights are never opened"),
    "archive": (put("adapter.tar.gz"), "adapter.tar.gz': archives are never unpacked"),
    "code": (put("modeling.py", b"open('x','w')"), "modeling.py': it is no part of an adapter"),
    "base config": (put("config.json", b'{"auto_map": {}}'), "config.json': it is no part of an adapter"),
    "tokenizer": (put("tokenizer.json", b"{}"), "tokenizer.json': it is no part of an adapter"),
    "hidden file": (put(".env"), ".env': it is no part of an adapter"),
    "name in other case": (put("Adapter_Config.json", b"{}"), "Adapter_Config.json': it is no part"),
    "name with a new line": (put("a\nb"), "a\\nb': it is no part"),
    "directory inside": (lambda d: (d / "default").mkdir(), "default': an adapter has no directories"),
    "symbolic link": (linked(WEIGHTS), f"file '{WEIGHTS}': it is a symbolic link"),
    "link to nowhere": (lambda d: (d / "README.md").symlink_to("/nowhere"), "README.md': it is a symbolic link"),
    "hard link": (lambda d: (d.parent / "other").hardlink_to(d / CONFIG), f"file '{CONFIG}': it is a hard link"),
    "config too large": (raw_config(b" " * 70_000), f"file '{CONFIG}': it has 70000 bytes"),
    "readme not text": (put("README.md", b"\xff\xfe"), "README.md': it is not UTF-8"),
}
MAGIC: dict[str, Case] = {
    "pickle under the name of weights": (weights(pickle.dumps(Payload())), "it is a Python pickle"),
    "zip under the name of weights": (zipped, "it is a zip archive"),
    "7z under the name of weights": (weights(b"7z\xbc\xaf\x27\x1c" + b"0" * 90), "it is a 7z archive"),
    "GGUF under the name of weights": (weights(b"GGUF" + b"\0" * 90), "it is a GGUF model"),
    "gzip under the name of a config": (raw_config(b"\x1f\x8b" + b"0" * 90), f"'{CONFIG}': it is a gzip archive"),
    "pickle under the name of a readme": (put("README.md", pickle.dumps(1)), "'README.md': it is a Python pickle"),
}
CONFIGS: dict[str, Case] = {
    "no JSON": (raw_config(b"r: 8"), "not strict JSON"),
    "not UTF-8": (raw_config(b'{"r": "\xff"}'), "not strict JSON"),
    "byte order mark": (raw_config(b'\xef\xbb\xbf{"r": 2}'), "not strict JSON"),
    "duplicate field": (raw_config(b'{"r": 2, "r": 64}'), "the same key twice"),
    "NaN in config": (raw_config(b'{"lora_alpha": NaN}'), "NaN is not a JSON number"),
    "tower of brackets": (raw_config(b"[" * 30_000), "nested deeper"),
    "list instead of object": (raw_config(b"[]"), "not a JSON object"),
    "rank missing": (without("r"), "field 'r' is missing"),
    "targets missing": (without("target_modules"), "field 'target_modules' is missing"),
    "unknown field": (config(sparkle=True), "field 'sparkle' is unknown"),
    "transformers field": (config(_attn_implementation_internal="evil/repo"), "'_attn_implementation_internal'"),
    "auto_map": (config(auto_map={"AutoModel": "evil.Model"}), "field 'auto_map' is unknown"),
    "import by auto_mapping": (config(auto_mapping={"parent_library": "evil"}), "field 'auto_mapping'"),
    "import by megatron": (config(megatron_config={}, megatron_core="evil.mod"), "field 'megatron_core'"),
    "remote code in tokenizer": (config(tokenizer_kwargs={"trust_remote_code": True}), "'tokenizer_kwargs' is unknown"),
    "other peft type": (config(peft_type="IA3"), "field 'peft_type'"),
    "DoRA": (config(use_dora=True), "field 'use_dora' (semantic) is True"),
    "bias": (config(bias="all"), "field 'bias'"),
    "lora bias": (config(lora_bias=True), "field 'lora_bias'"),
    "saved modules": (config(modules_to_save=["lm_head"]), "field 'modules_to_save'"),
    "rank pattern": (config(rank_pattern={"q_proj": 64}), "field 'rank_pattern'"),
    "alpha pattern": (config(alpha_pattern={"q_proj": 64}), "field 'alpha_pattern'"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "field 'init_lora_weights'"),
    "activated LoRA": (config(alora_invocation_tokens=[1]), "field 'alora_invocation_tokens'"),
    "layer replication": (config(layer_replication=[[0, 1]]), "field 'layer_replication'"),
    "fused experts": (config(target_parameters=["experts.w"]), "field 'target_parameters'"),
    "added tokens": (config(trainable_token_indices=[5]), "field 'trainable_token_indices'"),
    "transposed": (config(fan_in_fan_out=True), "field 'fan_in_fan_out'"),
    "all-linear": (config(target_modules="all-linear"), "field 'target_modules'"),
    "pattern as target": (config(target_modules="(a+)+$"), "field 'target_modules'"),
    "no target": (config(target_modules=[]), "field 'target_modules'"),
    "target twice": (config(target_modules=["q_proj", "q_proj"]), "field 'target_modules'"),
    "rank zero": (config(r=0), "field 'r'"),
    "rank true": (config(r=True), "field 'r'"),
    "rank as text": (config(r="2"), "field 'r'"),
    "alpha zero": (config(lora_alpha=0), "field 'lora_alpha'"),
    "alpha infinite": (raw_config(b'{"lora_alpha": 1e999}'), "field 'lora_alpha'"),
    "alpha of many decimals": (config(lora_alpha=1 / 3), "field 'lora_alpha'"),
    "other task": (config(task_type="SEQ_CLS"), "field 'task_type'"),
}
HEADERS: dict[str, Case] = {
    "too short": (weights(b"abc"), "too few for a safetensors header"),
    "header of 2^63 bytes": (weights(struct.pack("<Q", 1 << 63) + b"{}"), "the header claims"),
    "header above 1 MiB": (weights(struct.pack("<Q", (1 << 20) + 1) + b"{" * (2 << 20)), "at most 1048576"),
    "header beyond the file": (weights(struct.pack("<Q", 1000) + b"{}"), "more than the file has"),
    "header begins with a space": (header_text(lambda h: b" " + h), "does not begin with '{'"),
    "header no JSON": (header_text(lambda h: h[:-1]), "not strict JSON"),
    "tensor named twice": (header_text(lambda h: h[:-1] + f', "{Q_A}": 1}}'.encode()), "the same key twice"),
    "metadata twice": (header_text(lambda h: b'{"__metadata__": {}, ' + h[1:]), "the same key twice"),
    "metadata no text": (header(lambda d: d.update(__metadata__={"format": 1})), "'__metadata__'"),
    "no tensors": (lambda d: write_tensors(d, {}), "holds no tensors"),
    "name with a path": (tensors(**{"../../x": filled((1,))}), "tensor '../../x': its name"),
    "name with NUL": (tensors(**{"a\0b": filled((1,))}), "tensor 'a\\x00b': its name"),
    "name of a megabyte": (tensors(**{"a" * 300: filled((1,))}), "its name is not made of"),
    "name turned around": (tensors(**{"a\u202eb": filled((1,))}), "its name is not made of"),
    "unknown dtype": (header(set_field(Q_A, "dtype", "F4")), f"tensor {Q_A}: dtype 'F4'"),
    "further field": (header(set_field(Q_A, "extra", 1)), f"tensor {Q_A}: it must have exactly"),
    "shape negative": (header(set_field(Q_A, "shape", [-2, -8])), f"tensor {Q_A}: its shape"),
    "shape empty": (header(set_field(Q_A, "shape", [])), f"tensor {Q_A}: its shape"),
    "shape with zero": (tensors(**{Q_A: Stored("F32", (0, HIDDEN), b"")}), f"tensor {Q_A}: its shape"),
    "shape overflows": (header(set_field(Q_A, "shape", [1 << 60, 1 << 60])), f"tensor {Q_A}: its shape"),
    "shape of fractions": (header(set_field(Q_A, "shape", [2.0, 8.0])), f"tensor {Q_A}: its shape"),
    "shape and bytes disagree": (header(set_field(Q_A, "shape", [RANK, HIDDEN + 1])), "does not take the bytes"),
    "offsets overlap": (header(set_field(V_A, "data_offsets", [0, RANK * HIDDEN * 4])), "overlap"),
    "offsets beyond the file": (
        header(set_field(Q_A, "data_offsets", [1 << 40, (1 << 40) + RANK * HIDDEN * 4])),
        "leave a hole",
    ),
    "trailing bytes": (
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes() + b"PK\x03\x04"),
        "but the file holds",
    ),
    "truncated": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-1]), "but the file holds"),
}
TENSORS: dict[str, Case] = {
    "half missing": (tensors(**{Q_B: None}), f"tensor {Q_B}: it is missing"),
    "module missing": (tensors(**{Q_A: None, Q_B: None}), "module model.layers.0.self_attn.q_proj"),
    "too wide": (tensors(**{Q_A: filled((RANK, 2 * HIDDEN))}), f"tensor {Q_A}: its shape is (2, 16)"),
    "too narrow": (tensors(**{Q_A: filled((RANK, HIDDEN // 2))}), f"tensor {Q_A}: its shape is (2, 4)"),
    "other rank than declared": (config(r=4), f"tensor {Q_A}: its shape is (2, 8), but rank 4"),
    "rank above the pool": (config(r=64), "field 'r' is 64; this base's pools serve ranks up to 4"),
    "layer that does not exist": (
        tensors(**{tensor_name("mlp.down_proj", "A", 9): filled((RANK, 12))}),
        "the declared base has no module model.layers.9.mlp.down_proj",
    ),
    "layer claimed that does not exist": (config(layers_to_transform=[0, 1, 7]), "has no layer 7"),
    "module that does not exist": (config(target_modules=["foo_proj"]), "module 'foo_proj' is not supported"),
    "module the base lacks": (
        config(target_modules=[*TARGETS, "up_proj"]),
        "the declared base has no module 'up_proj'",
    ),
    "module no engine adapts": (config(target_modules=["lm_head"]), "module 'lm_head' is not supported"),
    "module not declared": (config(target_modules=["v_proj", "down_proj"]), f"tensor {Q_A}: the config names neither"),
    "prefix of another model": (
        tensors(**{"base_model.model.language_model.model.layers.0.mlp.down_proj.lora_A.weight": filled((RANK, 12))}),
        "the declared base has no module language_model.",
    ),
    "DoRA tensor": (
        tensors(**{"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": filled((HIDDEN,))}),
        "lora_magnitude_vector: this is no name of a LoRA tensor",
    ),
    "embedding tensor": (
        tensors(**{"base_model.model.model.embed_tokens.lora_embedding_A": filled((RANK, 16))}),
        "lora_embedding_A: this is no name of a LoRA tensor",
    ),
    "whole matrix": (
        tensors(**{"base_model.model.lm_head.weight": filled((16, HIDDEN))}),
        "lm_head.weight: this is no",
    ),
    "adapter name left in": (
        tensors(**{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": filled((RANK, HIDDEN))}),
        "lora_A.default.weight: this is no name of a LoRA tensor",
    ),
    "dtype of integers": (tensors(**{Q_A: Stored("I8", (RANK, HIDDEN), b"\1" * 16)}), f"tensor {Q_A}: dtype I8"),
    "dtypes mixed": (tensors(**{Q_A: filled((RANK, HIDDEN), dtype="F16")}), "mix dtypes (F16, F32)"),
    "NaN": (tensors(**{Q_A: filled((RANK, HIDDEN), float("nan"))}), f"tensor {Q_A}: it holds NaN"),
    "infinity": (tensors(**{Q_B: filled((HIDDEN, RANK), float("-inf"))}), f"tensor {Q_B}: it holds NaN or an inf"),
    "one NaN at the end": (
        tensors(**{Q_A: Stored("F32", (RANK, HIDDEN), bytes(60) + struct.pack("<f", float("nan")))}),
        f"tensor {Q_A}: it holds NaN",
    ),
    "huge value": (tensors(**{Q_A: filled((RANK, HIDDEN), 1e6)}), f"tensor {Q_A}: it holds a value of size 1e+06"),
}
CORPUS = {**FILES, **MAGIC, **CONFIGS, **HEADERS, **TENSORS}


def test_no_two_groups_of_the_corpus_share_a_name() -> None:
    assert len(CORPUS) == sum(map(len, (FILES, MAGIC, CONFIGS, HEADERS, TENSORS))) >= 100


@pytest.mark.parametrize(("spoil", "said"), CORPUS.values(), ids=CORPUS.keys())
def test_a_bad_adapter_is_refused_by_name(spoil: Spoil, said: str, tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    spoil(directory)
    found = problems_of(directory, tmp_path / "base")
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_value_that_is_not_finite_is_found_in_every_dtype(dtype: str, tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    changed = {**good_tensors(dtype=dtype), Q_A: filled((RANK, HIDDEN), float("inf"), dtype)}
    write_tensors(directory, changed)
    assert problems_of(directory, tmp_path / "base") == [f"tensor {Q_A}: it holds NaN or an infinite value"]
