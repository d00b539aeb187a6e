"""The engine contract on every engine: the fake, PEFT, vLLM in process, and vLLM in its own processes."""

import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from consumers.engines.engine import SlotEngine
from consumers.engines.fake import FakeEngine, Faults, marker, token_id
from consumers.engines.protocol import Artifact, EngineKind, EngineSettings
from consumers.engines.select import describe, engine_environment, make_engine
from tests.contracts.engine_suite import CONTEXT_MAX, ROWS, SLOTS, EngineContract, Rig

MARKERS = tuple(f"<m{index}>" for index in range(SLOTS + 2))


def settings(base_dir: Path, **changes: Any) -> EngineSettings:
    """Any: the fields of the settings."""
    fields: dict[str, Any] = {"dtype": "float32", "slots": SLOTS, "rows": ROWS, "rank_max": 8}
    return EngineSettings(base_dir=base_dir, context_max=CONTEXT_MAX, kv_bytes=32 << 20, **(fields | changes))


def placed(directory: Path, rank: int = 4) -> Artifact:
    """Move an adapter to where its digest is part of the path."""
    digest = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()
    target = directory.parent / "store" / digest
    shutil.copytree(directory, target, dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in target.iterdir())
    return Artifact(digest=f"sha256:{digest}", path=target, rank=rank, bytes=size)


def fake_artifact(index: int) -> Artifact:
    digest = hashlib.sha256(str(index).encode()).hexdigest()
    return Artifact(digest=f"sha256:{digest}", path=Path("/adapters") / digest, rank=4, bytes=1000)


def fake_rig(faults: Faults) -> Rig:
    artifacts = [fake_artifact(index) for index in range(SLOTS + 4)]
    *adapters, zero, broken = artifacts
    faults.load_fails.add(broken.digest)
    options = settings(Path("/"), fake_step_ms=0.0)
    return Rig(
        engine=FakeEngine(describe("fake", options), options, faults),
        artifacts=adapters,
        markers=[marker(artifact.digest) for artifact in adapters],
        zero=zero,
        broken=broken,
        chat_ids=lambda text: tuple(token_id(word) for word in ["user", *text.split()]),
    )


def real_rig(kind: EngineKind, directory: Path) -> Rig:
    from tests import models
    from tokenizers import Tokenizer

    base = models.tiny_base(directory / "base")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    engine = make_engine(kind, settings(base))
    assert isinstance(engine, SlotEngine)
    return Rig(
        engine=engine,
        artifacts=[placed(models.marker_adapter(directory / text, base, text)) for text in MARKERS],
        markers=MARKERS,
        zero=placed(models.zero_adapter(directory / "zero", base)),
        broken=placed(wide_adapter(directory / "wide", base)),
        chat_ids=lambda text: tuple(
            tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        ),
        caches_prefixes=kind != "peft",
    )


def wide_adapter(directory: Path, base: Path) -> Path:
    """Made for a base twice as wide: vLLM raises when it copies the weights, with the id already active."""
    import numpy as np
    from safetensors.numpy import load_file, save_file
    from tests import models

    models.marker_adapter(directory, base, 60)
    weights = load_file(directory / "adapter_model.safetensors")
    doubled = {name: np.repeat(np.repeat(tensor, 1 + ("_A" in name), 1), 1 + ("_B" in name), 0) for name, tensor in weights.items()}
    save_file(doubled, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One engine per class: a real one takes half a minute to start."""
    kind: EngineKind = request.cls.kind
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        made = fake_rig(Faults()) if kind == "fake" else real_rig(kind, tmp_path_factory.mktemp(kind))
        await made.engine.start()
        yield made
        await made.engine.stop()


class TestFake(EngineContract):
    """The fake keeps the whole contract, so that a worker tested on it is tested."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")
    kind: EngineKind = "fake"


REAL = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="class"),
    pytest.mark.timeout(300),
    # The libraries' own warnings are not ours to mend.
    pytest.mark.filterwarnings("default"),
]


class TestVllm(EngineContract):
    """vLLM in this process."""

    pytestmark = REAL
    kind: EngineKind = "vllm"


class TestPeft(EngineContract):
    """Transformers and PEFT."""

    pytestmark = REAL
    kind: EngineKind = "peft"


class TestVllmAsync(EngineContract):
    """vLLM in its own processes."""

    pytestmark = [*REAL, pytest.mark.slow]
    kind: EngineKind = "vllm-async"
