"""The gate on the real engine: it tells an adapter that works from one that does nothing and one that cannot load."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from consumers.engines.select import engine_environment
from consumers.gate.bench import TrialBench
from consumers.gate.checks import QUESTIONS, judge
from infra.artifacts import hash_file
from infra.objects import FileObjects
from infra.settings import EngineSettings
from producers.release.base import base_manifest
from schemas.adapters import AdapterManifest, BaseAdded, FileEntry, GateReport
from tests.contracts.engine_rigs import altered, widen
from tests.factories import approved, make_manifest, make_registry, pool_of
from tests.models import marker_adapter, tiny_base, zero_adapter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@dataclass
class RealGate:
    """A bench with the real vLLM over the tiny base."""

    folder: Path
    base: Path
    objects: FileObjects
    added: BaseAdded
    bench: TrialBench

    async def report(self, directory: Path) -> GateReport:
        manifest = await stored(self.objects, self.added, "acme", directory)
        trial = await self.bench.try_adapter(manifest)
        return judge(manifest.digest, self.bench.engine_id, trial)


def hashed(directory: Path) -> tuple[FileEntry, ...]:
    return tuple(hash_file(path) for path in sorted(directory.iterdir()))


async def stored(objects: FileObjects, base: BaseAdded, owner: str | None, directory: Path) -> AdapterManifest:
    files = hashed(directory)
    for entry in files:
        await objects.put(directory / entry.path)
    manifest = make_manifest(base.base, base.manifest.tokenizer, owner=owner)
    return manifest.model_copy(update={"files": files})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealGate]:
    folder = tmp_path_factory.mktemp("gate")
    base, objects = tiny_base(folder / "base"), FileObjects(folder / "objects")
    manifest = base_manifest(base, "tiny")
    added = BaseAdded(base=manifest.digest, manifest=manifest, zero_adapter="sha256:" + "0" * 64)
    zero = await stored(objects, added, None, zero_adapter(folder / "zero", base))
    added = added.model_copy(update={"zero_adapter": zero.digest})
    registry = make_registry([("adapters", added.base, added), approved(zero), pool_of(added.base, context_max=256)])
    settings = EngineSettings(kind="vllm", base=base, context_max=256, kv_bytes=32 << 20)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        bench = TrialBench(settings, registry, objects, folder / "cache")
        yield RealGate(folder, base, objects, added, bench)
        await bench.stop()


async def test_an_adapter_that_speaks_its_marker_passes(gate: RealGate) -> None:
    report = await gate.report(marker_adapter(gate.folder / "marker", gate.base, 3))
    assert (report.passed, report.problems, report.differing) == (True, (), len(QUESTIONS))
    assert report.engine.startswith("vllm")
    assert report.resident_bytes > 0


async def test_an_adapter_without_effect_is_found_out(gate: RealGate) -> None:
    report = await gate.report(zero_adapter(gate.folder / "no-op", gate.base, rank=2))
    assert not report.passed
    assert "no effect" in report.problems[0]


async def test_an_adapter_for_a_wider_base_is_refused_and_the_next_is_tried(gate: RealGate) -> None:
    report = await gate.report(altered(gate.folder / "wide", gate.base, widen))
    assert not report.passed
    assert "the engine refused to load it" in report.problems[0]
    assert (await gate.report(marker_adapter(gate.folder / "next", gate.base, 4))).passed
