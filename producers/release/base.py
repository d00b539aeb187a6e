"""A base model: its manifest, which is its identity, and the zero adapter under which base-model jobs run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.artifacts import base_files, hash_file
from producers.release.inspect import read_header
from producers.release.scan import CONFIG, WEIGHTS
from producers.release.tensors import BASE_HEADER_BYTES_MAX, BadTensors, zeros
from producers.release.validate import SUPPORTED
from schemas.adapters import AdapterManifest, BaseManifest, FileEntry
from schemas.digest import canonical, digest_of
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.record import strict_json

CONFIG_BYTES_MAX = 1 << 20
# Where the words and the chat template are. Files of other names cannot change what a prompt becomes.
TOKENIZER_FILES = frozenset({
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
})  # fmt: skip
# The fewest modules of which every Llama-like base has both: all zero, so which ones does not matter.
ZERO_TARGETS = ("q_proj", "v_proj")
ZERO_DTYPE = "BF16"


class BadBase(SwitchyardError):
    """The directory is no base model that Switchyard can serve."""


def base_manifest(directory: Path, name: str) -> BaseManifest:
    """Hash a base model's files and read its shapes; nothing of it is executed. Raises BadBase, BaseMismatch.

    Blocks for about a second per gigabyte.
    """
    paths = {path.name: path for path in base_files(directory)}
    config = _read_json(directory / "config.json")
    if not {"tokenizer.json", "tokenizer.model"} & paths.keys():
        raise BadBase(f"{directory} has neither tokenizer.json nor tokenizer.model")
    for path in (paths[found] for found in ("config.json", "tokenizer_config.json") if found in paths):
        if "auto_map" in _read_json(path):
            raise BadBase(f"{path}: 'auto_map' names code, which is never run")
    modules = {
        name: shape for path in paths.values() if path.suffix == ".safetensors" for name, shape in _modules(path)
    }
    if not any(_is_supported(path) for path in modules):
        raise BadBase(f"{directory} has no module that takes an adapter ({', '.join(SUPPORTED)})")
    files = tuple(hash_file(path) for path in paths.values())
    return BaseManifest(
        name=name,
        files=files,
        tokenizer=tokenizer_digest(files),
        architecture=_field(config, "architectures", list)[0],
        layers=_field(config, "num_hidden_layers", int),
        hidden=_field(config, "hidden_size", int),
        vocabulary=_field(config, "vocab_size", int),
        context_max=_field(config, "max_position_embeddings", int),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        modules=dict(sorted(modules.items())),
    )


def tokenizer_digest(files: tuple[FileEntry, ...]) -> str:
    """Over the tokenizer files and the chat template, which lies in one of them."""
    return digest_of(canonical([entry.model_dump() for entry in files if entry.path in TOKENIZER_FILES]))


def write_zero_adapter(base: BaseManifest, rank: int, directory: Path) -> None:
    """Write the adapter that changes nothing: equal bases and ranks give equal bytes."""
    paths = [path for path in base.modules if path.rsplit(".", 1)[-1] in ZERO_TARGETS]
    targets = sorted({path.rsplit(".", 1)[-1] for path in paths})
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        inputs, outputs = base.modules[path]
        shapes[f"base_model.model.{path}.lora_A.weight"] = (rank, inputs)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (outputs, rank)
    config = {
        "base_model_name_or_path": base.name,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (directory / WEIGHTS).write_bytes(zeros(shapes, ZERO_DTYPE))


def zero_manifest(base: BaseManifest, rank: int, files: tuple[FileEntry, ...]) -> AdapterManifest:
    """The platform owns it, so that every tenant may run under it."""
    targets = {path.rsplit(".", 1)[-1] for path in base.modules} & set(ZERO_TARGETS)
    return AdapterManifest(
        owner=None,
        base=base.digest,
        tokenizer=base.tokenizer,
        files=files,
        rank=rank,
        alpha=str(rank),
        target_modules=tuple(sorted(targets)),
        dtype="bfloat16",
        max_replicas=64,
    )


def _modules(path: Path) -> list[tuple[str, tuple[int, int]]]:
    """Module path to (inputs, outputs), for every matrix of one weights file."""
    try:
        with path.open("rb") as file:
            tensors, _ = read_header(file, BASE_HEADER_BYTES_MAX)
    except BadTensors as error:
        raise BadBase(f"{path}: {error}") from error
    return [
        (tensor.name.removesuffix(".weight"), (tensor.shape[1], tensor.shape[0]))
        for tensor in tensors
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and "embed" not in tensor.name
    ]


def _is_supported(path: str) -> bool:
    return path.rsplit(".", 1)[-1] in SUPPORTED


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = strict_json(path.read_bytes(), CONFIG_BYTES_MAX)
    except OSError as error:
        raise BadBase(f"{path} cannot be read: {error.strerror}") from error
    except InvalidRecord as error:
        raise BadBase(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise BadBase(f"{path} is not a JSON object")
    return document


def _field(config: Mapping[str, Any], name: str, kind: type) -> Any:
    """`Any` because JSON is; the kind is checked here and the value by the manifest."""
    value = config.get(name)
    if type(value) is not kind or not value:
        raise BadBase(f"config.json: field '{name}' is missing or of another kind")
    return value
