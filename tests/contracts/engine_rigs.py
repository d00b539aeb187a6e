"""The engines that the contract runs on, each with adapters whose answers can be told apart."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from consumers.engines.engine import SlotEngine
from consumers.engines.fake import FakeEngine, Faults, marker, token_id
from consumers.engines.protocol import Artifact, EngineKind, EngineSettings
from consumers.engines.select import describe, make_engine
from tests.contracts.engine_rig import CONTEXT_MAX, ROWS, SLOTS, Rig
from tests.models import TARGET_MODULES, marker_adapter, tiny_base, zero_adapter

MARKERS = tuple(f"<m{index}>" for index in range(SLOTS + 2))
Weights = dict[str, NDArray[np.float32]]


def settings(base_dir: Path, **changes: Any) -> EngineSettings:
    """Any: the fields of the settings."""
    fields: dict[str, Any] = {"dtype": "float32", "slots": SLOTS, "rows": ROWS, "rank_max": 8}
    return EngineSettings(base_dir=base_dir, context_max=CONTEXT_MAX, kv_bytes=32 << 20, **(fields | changes))


def placed(directory: Path, rank: int = 4, modules: tuple[str, ...] = TARGET_MODULES) -> Artifact:
    """Copy an adapter to where its digest is part of the path."""
    files = sorted(directory.iterdir())
    digest = hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
    target = directory.parent / "store" / digest
    shutil.copytree(directory, target, dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in files)
    return Artifact(digest=f"sha256:{digest}", path=target, rank=rank, bytes=size, target_modules=modules)


def altered(directory: Path, base: Path, change: Callable[[Weights], Weights]) -> Path:
    """A marker adapter with other weights."""
    marker_adapter(directory, base, 60)
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return directory


def widen(weights: Weights) -> Weights:
    """As if made for a base twice as wide: vLLM raises when it copies the weights, with the id already active."""
    return {
        name: np.repeat(np.repeat(tensor, 1 + ("_A" in name), 1), 1 + ("_B" in name), 0)
        for name, tensor in weights.items()
    }


def poison(weights: Weights) -> Weights:
    return {name: np.full_like(tensor, np.nan) for name, tensor in weights.items()}


def fake_artifact(index: int) -> Artifact:
    digest = hashlib.sha256(str(index).encode()).hexdigest()
    return Artifact(digest=f"sha256:{digest}", path=Path("/adapters") / digest, rank=4, bytes=1000)


def fake_rig(faults: Faults, **changes: Any) -> Rig:
    """Any: the fields of the settings."""
    artifacts = [fake_artifact(index) for index in range(SLOTS + 5)]
    *adapters, zero, broken, poisoned = artifacts
    faults.load_fails.add(broken.digest)
    faults.corrupts.add(poisoned.digest)
    options = settings(Path("/"), **({"fake_step_ms": 0.0} | changes))
    return Rig(
        engine=FakeEngine(describe("fake", options), options, faults),
        artifacts=adapters,
        markers=[marker(artifact.digest) for artifact in adapters],
        zero=zero,
        broken=broken,
        poisoned=poisoned,
        chat_ids=lambda text: tuple(token_id(word) for word in ["user", *text.split()]),
    )


def real_rig(kind: EngineKind, directory: Path) -> Rig:
    base = tiny_base(directory / "base")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    engine = make_engine(kind, settings(base))
    assert isinstance(engine, SlotEngine)

    def chat_ids(text: str) -> tuple[int, ...]:
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(tokenizer.encode(rendered, add_special_tokens=False).ids)

    return Rig(
        engine=engine,
        artifacts=[placed(marker_adapter(directory / text, base, text)) for text in MARKERS],
        markers=MARKERS,
        zero=placed(zero_adapter(directory / "zero", base)),
        broken=placed(altered(directory / "wide", base, widen)),
        poisoned=placed(altered(directory / "nan", base, poison)),
        chat_ids=chat_ids,
        caches_prefixes=kind != "peft",
        prefills_apart=kind == "peft",
    )
