"""`adapter_config.json`: every field that PEFT writes, and which values of it the engines honour. Pure.

A field is *semantic* (it changes what the adapter computes: only values that every engine honours are taken),
*training-only* (recorded, without effect when serving), or *identity* (a claim that proves nothing: the base is bound
by its digest). PEFT and vLLM drop fields they do not know, and so serve something else than was trained: here an
unknown field is refused.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.errors import InvalidRecord, SwitchyardError
from schemas.record import strict_json

CONFIG_BYTES_MAX = 64 << 10
NAME_CHARACTERS_MAX = 512
TARGETS_MAX = 512
RANK_MAX = 512
ALPHA_MAX = 100_000


class BadConfig(SwitchyardError):
    """The file is not JSON that every parser reads alike."""


class Kind(StrEnum):
    """What a field says."""

    SEMANTIC = "semantic"
    TRAINING_ONLY = "training-only"
    IDENTITY = "identity"


@dataclass(frozen=True)
class Field:
    """One field: `takes` tells whether a value is served as it was meant, `rule` says in words what is taken.

    `Any` throughout because JSON is.
    """

    kind: Kind
    takes: Callable[[Any], bool]
    rule: str


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What serving needs of a config that has no problems."""

    rank: int
    alpha: str
    target_modules: tuple[str, ...]
    # None: every layer.
    layers: frozenset[int] | None


def _only(*values: Any) -> Callable[[Any], bool]:
    # `True == 1` in Python, so the type is compared too.
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _is_text(given: Any) -> bool:
    return given is None or (isinstance(given, str) and len(given) <= NAME_CHARACTERS_MAX)


def _is_settings(given: Any) -> bool:
    return given is None or isinstance(given, dict)


def _is_number(given: Any, low: float, high: float) -> bool:
    return type(given) in (int, float) and math.isfinite(given) and low <= given <= high


def _is_alpha(given: Any) -> bool:
    return _is_number(given, 1e-6, ALPHA_MAX) and float(f"{given:.6f}") == given


def _are_targets(given: Any) -> bool:
    return (
        isinstance(given, list)
        and 1 <= len(given) <= TARGETS_MAX
        and all(isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX for name in given)
        and len(set(given)) == len(given)
    )


def _are_layers(given: Any) -> bool:
    layers = given if isinstance(given, list) else [given]
    return given is None or (bool(layers) and all(type(layer) is int and 0 <= layer < 4096 for layer in layers))


def _unsupported(*values: Any) -> Field:
    """A feature that some engine ignores or refuses: only the values that switch it off."""
    shown = " or ".join({None: "null", True: "true", False: "false"}.get(v, repr(v)) if not isinstance(v, dict | list)
                        else str(v) for v in values)  # fmt: skip
    return Field(Kind.SEMANTIC, _only(*values), f"only {shown} is supported")


NO_OBJECT = _unsupported(None, {})
NO_LIST = _unsupported(None, [])
NO_FLAG = _unsupported(None, False)
IDENTITY_TEXT = Field(Kind.IDENTITY, _is_text, f"text of at most {NAME_CHARACTERS_MAX} characters, or null")
TRAINING_SETTINGS = Field(Kind.TRAINING_ONLY, _is_settings, "an object or null")

REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")
FIELDS: dict[str, Field] = {
    "peft_type": _unsupported("LORA"),
    "r": Field(Kind.SEMANTIC, lambda v: type(v) is int and 1 <= v <= RANK_MAX, f"a whole number from 1 to {RANK_MAX}"),
    "lora_alpha": Field(Kind.SEMANTIC, _is_alpha, f"a number above 0 and up to {ALPHA_MAX}, at most six decimals"),
    "target_modules": Field(
        Kind.SEMANTIC, _are_targets, "a list of module names, each once (no pattern and no 'all-linear')"
    ),
    "layers_to_transform": Field(Kind.SEMANTIC, _are_layers, "null, a layer number or a list of layer numbers"),
    "use_rslora": Field(Kind.SEMANTIC, _only(None, True, False), "true or false"),
    # PEFT's other initialisations change the base's weights at every load, which cannot be done for one of many.
    "init_lora_weights": Field(
        Kind.SEMANTIC,
        _only(None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
        "an initialisation that leaves the base as it is (true, false, gaussian, eva, orthogonal, mica or lora_ga)",
    ),
    "bias": _unsupported("none"),
    "lora_bias": NO_FLAG,
    "use_dora": NO_FLAG,
    "use_qalora": NO_FLAG,
    "fan_in_fan_out": NO_FLAG,
    "ensure_weight_tying": NO_FLAG,
    "modules_to_save": NO_LIST,
    "exclude_modules": NO_LIST,
    "target_parameters": NO_LIST,
    "rank_pattern": NO_OBJECT,
    "alpha_pattern": NO_OBJECT,
    "layers_pattern": NO_LIST,
    "layer_replication": NO_LIST,
    "trainable_token_indices": NO_LIST,
    "alora_invocation_tokens": NO_LIST,
    "use_bdlora": NO_OBJECT,
    "arrow_config": NO_OBJECT,
    "kasa_config": NO_OBJECT,
    "corda_config": NO_OBJECT,
    "velora_config": NO_OBJECT,
    "monteclora_config": NO_OBJECT,
    # PEFT imports the modules that these three name.
    "auto_mapping": NO_OBJECT,
    "megatron_config": NO_OBJECT,
    "megatron_core": _unsupported(None, "megatron.core"),
    "runtime_config": NO_OBJECT,
    "qalora_group_size": Field(Kind.TRAINING_ONLY, lambda v: type(v) is int, "a whole number"),
    "lora_dropout": Field(Kind.TRAINING_ONLY, lambda v: _is_number(v, 0, 1), "a number from 0 to 1"),
    "inference_mode": Field(Kind.TRAINING_ONLY, _only(None, True, False), "true or false"),
    "eva_config": TRAINING_SETTINGS,
    "loftq_config": TRAINING_SETTINGS,
    "lora_ga_config": TRAINING_SETTINGS,
    "task_type": Field(Kind.IDENTITY, _only(None, "CAUSAL_LM"), "'CAUSAL_LM' or null"),
    "base_model_name_or_path": IDENTITY_TEXT,
    "revision": IDENTITY_TEXT,
    "peft_version": IDENTITY_TEXT,
}  # fmt: skip


def read_config(content: bytes) -> dict[str, Any]:
    """The fields as they stand. Raises BadConfig."""
    try:
        document = strict_json(content, CONFIG_BYTES_MAX)
    except InvalidRecord as error:
        raise BadConfig(f"it is not strict JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadConfig("it is not a JSON object")
    return document


def config_problems(document: dict[str, Any]) -> Iterator[str]:
    """A sentence for every field that is missing, unknown, or has a value that would not be honoured."""
    for name in REQUIRED:
        if name not in document:
            yield f"field '{name}' is missing"
    for name, value in document.items():
        field = FIELDS.get(name)
        if field is None:
            yield f"field {ascii(name)[:80]} is unknown: what it would change is not known either"
        elif not field.takes(value):
            yield f"field '{name}' ({field.kind}) is {ascii(value)[:60]}; it takes {field.rule}"


def adapter_config(document: dict[str, Any]) -> AdapterConfig:
    """What serving needs of a document without problems."""
    layers = document.get("layers_to_transform")
    alpha = f"{document['lora_alpha']:.6f}".rstrip("0").rstrip(".")
    return AdapterConfig(
        rank=document["r"],
        alpha=alpha,
        # PEFT writes a set in any order: the same adapter must not get two digests for it.
        target_modules=tuple(sorted(document["target_modules"])),
        layers=None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
    )
