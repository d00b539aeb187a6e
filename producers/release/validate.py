"""Whether an adapter's tensors are a whole LoRA for exactly the declared base. Pure.

vLLM loads adapters that are too narrow, lack modules or name layers that do not exist, and then answers with the base
or with damaged weights. So every tensor is compared with the base's own modules before any engine sees the adapter.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from producers.release.config import AdapterConfig
from producers.release.tensors import Tensor

# What vLLM's Llama-like models accept as adapter modules.
SUPPORTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Trained adapters stay below 10; a larger value overflows float16 activations and reaches other rows as NaN.
VALUE_MAX = 1000.0
TENSOR_PATTERN = re.compile(
    r"base_model\.model\.(?P<module>[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*)\.lora_(?P<side>[AB])\.weight"
)
LAYER_PATTERN = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")

Modules = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A tensor whose name says which half of which module it is."""

    tensor: Tensor
    module: str
    side: str


def adapter_problems(
    config: AdapterConfig, tensors: Iterable[Tensor], modules: Modules, rank_max: int
) -> Iterator[str]:
    """A sentence for everything in which the adapter is not a whole LoRA of this rank for these modules."""
    if config.rank > rank_max:
        yield f"field 'r' is {config.rank}; this base's pools serve ranks up to {rank_max}"
    expected = expected_modules(config, modules)
    yield from _target_problems(config, modules)
    named: dict[tuple[str, str], Named] = {}
    dtypes = set()
    for tensor in tensors:
        dtypes.add(tensor.dtype)
        match = TENSOR_PATTERN.fullmatch(tensor.name)
        if match is None:
            yield f"tensor {tensor.name}: this is no name of a LoRA tensor"
            continue
        found = Named(tensor=tensor, module=match["module"], side=match["side"])
        named[found.module, found.side] = found
        yield from _tensor_problems(found, config, modules, expected)
    yield from _pair_problems(named, expected)
    if len(dtypes) > 1:
        yield f"the tensors mix dtypes ({', '.join(sorted(dtypes))}); an adapter has one"


def value_problem(tensor: Tensor, magnitude: float) -> str | None:
    """Whether all values of a tensor are finite and of a sane size."""
    if magnitude <= VALUE_MAX:
        return None
    if magnitude == float("inf") or magnitude != magnitude:
        return f"tensor {tensor.name}: it holds NaN or an infinite value"
    return f"tensor {tensor.name}: it holds a value of size {magnitude:.4g}; at most {VALUE_MAX:g} is taken"


def expected_modules(config: AdapterConfig, modules: Modules) -> frozenset[str]:
    """The base's modules that the config names, by PEFT's rule: the whole path, or its end at a dot."""
    return frozenset(
        path
        for path in modules
        if any(_names(target, path) for target in config.target_modules) and _in_layers(config, path)
    )


def _target_problems(config: AdapterConfig, modules: Modules) -> Iterator[str]:
    for target in config.target_modules:
        if target.rsplit(".", 1)[-1] not in SUPPORTED:
            yield (
                f"field 'target_modules': module {ascii(target)[:80]} is not supported by the engines, "
                f"which take {', '.join(SUPPORTED)}"
            )
        elif not any(_names(target, path) for path in modules):
            yield f"field 'target_modules': the declared base has no module {ascii(target)[:80]}"
    known = {int(found[1]) for found in map(LAYER_PATTERN.search, modules) if found}
    for layer in sorted((config.layers or frozenset()) - known):
        yield f"field 'layers_to_transform': the declared base has no layer {layer}"


def _tensor_problems(found: Named, config: AdapterConfig, modules: Modules, expected: frozenset[str]) -> Iterator[str]:
    tensor = found.tensor
    if tensor.dtype not in DTYPES:
        yield f"tensor {tensor.name}: dtype {tensor.dtype} is not one of {', '.join(DTYPES)}"
    if found.module not in modules:
        yield f"tensor {tensor.name}: the declared base has no module {found.module}"
    elif found.module not in expected:
        yield f"tensor {tensor.name}: the config names neither its module in 'target_modules' nor its layer"
    else:
        inputs, outputs = modules[found.module]
        wanted = (config.rank, inputs) if found.side == "A" else (outputs, config.rank)
        if tensor.shape != wanted:
            yield (
                f"tensor {tensor.name}: its shape is {tensor.shape}, but rank {config.rank} on the declared base "
                f"needs {wanted}"
            )


def _pair_problems(named: Mapping[tuple[str, str], Named], expected: frozenset[str]) -> Iterator[str]:
    for module in sorted(expected):
        missing = [side for side in "AB" if (module, side) not in named]
        if len(missing) == 2:
            yield f"module {module}: 'target_modules' names it but the file has no tensors for it"
        elif missing:
            yield f"tensor base_model.model.{module}.lora_{missing[0]}.weight: it is missing, its other half is there"


def _names(target: str, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _in_layers(config: AdapterConfig, path: str) -> bool:
    if config.layers is None:
        return True
    found = LAYER_PATTERN.search(path)
    return found is not None and int(found[1]) in config.layers
