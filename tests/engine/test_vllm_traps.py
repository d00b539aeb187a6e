"""The traps of vLLM that our engine must walk around, on the real vLLM in this process.

Two kinds of test: what a tenant's adapter may do to the others (nothing), and what vLLM itself still does. When one of
the second kind fails after an upgrade, a precaution may have become unnecessary, or a private attribute has moved.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from consumers.engines.protocol import EngineFault, LoadFailed, RequestInvalid
from consumers.engines.residents import Listed
from consumers.engines.select import engine_environment
from consumers.engines.vllm import lora_request
from tests.contracts.engine_rig import SLOTS, Rig, core_of
from tests.contracts.engine_rigs import placed, real_rig
from tests.models import marker_adapter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

NOTHING = Listed(slots=frozenset(), host={})
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        rig = real_rig("vllm", tmp_path_factory.mktemp("vllm"))
        await rig.engine.start()
        yield rig
        await rig.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(module_rig: Rig) -> AsyncIterator[Rig]:
    yield module_rig
    for digest in module_rig.engine.resident():
        await module_rig.engine.unload(digest)
    for digest in module_rig.engine.staged():
        await module_rig.engine.unstage(digest)
    assert module_rig.engine.healthy()


def configure(directory: Path, **changes: Any) -> None:
    """Any: fields of the adapter's configuration."""
    file = directory / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "weights cut short": truncate,
    "an impossible header": lambda path: (path / WEIGHTS).write_bytes(b"\xff" * 64),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "no configuration": lambda path: (path / CONFIG).unlink(),
    "a configuration that is no JSON": lambda path: (path / CONFIG).write_text("{"),
    "no directory": shutil.rmtree,
    "a rank above the limit": lambda path: configure(path, r=64),
    "DoRA": lambda path: configure(path, use_dora=True),
    "trained biases": lambda path: configure(path, bias="all"),
    "whole modules": lambda path: configure(path, modules_to_save=["lm_head"]),
}


def base_of(rig: Rig) -> Path:
    return rig.engine._settings.base_dir


def on_engine_thread(rig: Rig, command: Callable[[Any], Any]) -> Any:
    """Any: vLLM's own engine, between two steps."""
    backend: Any = rig.engine._backend
    return backend._call(lambda: command(core_of(rig)._llm))


@pytest.mark.parametrize("breakage", BREAKAGES)
async def test_a_broken_adapter_fails_to_load_and_touches_nobody(rig: Rig, tmp_path: Path, breakage: str) -> None:
    await rig.load(rig.artifacts[0])
    beside = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=30))
    broken = placed(marker_adapter(tmp_path / "broken", base_of(rig), 61))
    BREAKAGES[breakage](broken.path)
    with pytest.raises(LoadFailed):
        await rig.load(broken)
    assert await rig.engine._backend.listed() == rig.engine._residents.listed
    assert await beside == await rig.alone(rig.artifacts[0], "ba de fi", 30)


async def test_vllm_itself_leaves_the_id_of_a_failed_load_active(rig: Rig) -> None:
    lora = lora_request(rig.broken.digest, 900, str(rig.broken.path))
    with pytest.raises(RuntimeError):
        await on_engine_thread(rig, lambda llm: llm.add_lora(lora))
    assert (await rig.engine._backend.listed()).slots == {900}
    assert await on_engine_thread(rig, lambda llm: llm.add_lora(lora))
    await rig.engine._backend.remove(900)
    assert await rig.engine._backend.listed() == NOTHING


async def test_vllm_itself_clears_the_oldest_slot_for_one_more_and_ours_refuses(rig: Rig) -> None:
    await rig.load(*rig.artifacts[:SLOTS])
    await rig.engine.stage(rig.artifacts[SLOTS])
    full = await rig.engine._backend.listed()
    fifth = rig.engine._residents.id_of(rig.artifacts[SLOTS].digest)
    with pytest.raises(RuntimeError, match="slots are full"):
        await rig.engine._backend.activate(fifth)
    assert await rig.engine._backend.listed() == full
    await on_engine_thread(
        rig, lambda llm: llm.add_lora(lora_request(rig.artifacts[SLOTS].digest, fifth, str(rig.artifacts[SLOTS].path)))
    )
    assert fifth in (await rig.engine._backend.listed()).slots
    assert len((await rig.engine._backend.listed()).slots) == SLOTS
    # The table as it was, for the tests behind this one.
    await rig.engine._backend.deactivate(fifth)
    (lost,) = full.slots - (await rig.engine._backend.listed()).slots
    await rig.engine._backend.activate(lost)


async def test_vllm_itself_serves_the_old_weights_under_an_id_used_twice(rig: Rig) -> None:
    first, second = rig.artifacts[:2]
    await on_engine_thread(rig, lambda llm: llm.add_lora(lora_request(first.digest, 901, str(first.path))))
    assert await on_engine_thread(rig, lambda llm: llm.add_lora(lora_request(second.digest, 901, str(second.path))))
    adapters = await on_engine_thread(rig, lambda llm: llm.collective_rpc("holdings")[0])
    assert adapters[0] == [901]
    await rig.engine._backend.remove(901)


async def test_vllm_itself_finds_kv_by_name_and_path_and_not_by_id(rig: Rig) -> None:
    artifact, prompt = rig.artifacts[0], "la me ni po " * 20
    ids: set[int] = set()
    for expect_cached in (False, True):
        await rig.load(artifact)
        ids |= (await rig.engine._backend.listed()).slots
        deltas = await rig.deltas(artifact, prompt, cache_salt="reloaded")
        assert (deltas[0].cached_tokens > 0) == expect_cached
        assert "".join(delta.text for delta in deltas) == await rig.alone(artifact, prompt, 8)
        await rig.engine.unload(artifact.digest)
    assert len(ids) == 2


async def test_name_path_and_id_of_a_request_are_those_of_its_digest(rig: Rig) -> None:
    await rig.load(*rig.artifacts[:2])
    async with aclosing(rig.engine.generate(rig.request(rig.artifacts[1], max_tokens=100))) as stream:
        await anext(stream)
        states = await on_engine_thread(rig, lambda llm: list(llm.engine_core.engine_core.scheduler.requests.values()))
        lora = states[0].lora_request
    assert lora.lora_name == rig.artifacts[1].digest
    assert lora.lora_name.removeprefix("sha256:") in lora.lora_path
    assert lora.lora_int_id == rig.engine._residents._ids[rig.artifacts[1].digest]


async def test_an_adapter_unloaded_right_after_an_abort_does_not_come_back(rig: Rig, tmp_path: Path) -> None:
    gone = placed(marker_adapter(tmp_path / "gone", base_of(rig), 62))
    await rig.load(rig.artifacts[0], gone)
    beside = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=40))
    async with aclosing(rig.engine.generate(rig.request(gone, max_tokens=100))) as stream:
        await anext(stream)
    await rig.engine.unload(gone.digest)
    shutil.rmtree(gone.path)
    assert await beside == await rig.alone(rig.artifacts[0], "ba de fi", 40)
    assert await rig.engine._backend.listed() == rig.engine._residents.listed


async def test_a_fault_while_vllm_loads_inside_a_step_is_survived(rig: Rig, tmp_path: Path) -> None:
    lost = placed(marker_adapter(tmp_path / "lost", base_of(rig), 63))
    await rig.load(rig.artifacts[0], lost)
    int_id = rig.engine._residents._ids[lost.digest]
    await on_engine_thread(rig, lambda llm: llm.remove_lora(int_id))
    content = [(file.name, file.read_bytes()) for file in lost.path.iterdir()]
    shutil.rmtree(lost.path)
    with pytest.raises(EngineFault, match="LoRA"):
        await rig.answer(lost)
    lost.path.mkdir()
    for name, written in content:
        (lost.path / name).write_bytes(written)
    assert (await rig.answer(lost)).startswith("<m63>")
    assert (await rig.answer(rig.artifacts[0])).startswith(rig.markers[0])


async def test_requests_without_room_or_sense_are_refused_one_by_one(rig: Rig) -> None:
    await rig.load(rig.artifacts[0])
    sane = rig.request(rig.artifacts[0])
    for wrong in (
        replace(sane, request_id="long", prompt_ids=(70,) * 300),
        replace(sane, request_id="hot", temperature=-1.0),
        replace(sane, request_id="wide", top_p=7.0),
    ):
        with pytest.raises(RequestInvalid):
            await anext(rig.engine.generate(wrong))
    assert (await rig.answer(rig.artifacts[0])).startswith(rig.markers[0])


async def test_measured_bytes_are_those_of_the_weights(rig: Rig) -> None:
    loaded = await rig.engine.load(rig.artifacts[0])
    weights = (rig.artifacts[0].path / WEIGHTS).stat().st_size
    assert 0.8 * weights < loaded.bytes <= weights


async def test_the_base_is_as_large_as_its_checkpoint_also_where_vllm_hides_its_weights(rig: Rig) -> None:
    tensors = load_file(base_of(rig) / "model.safetensors").values()
    memory = await rig.engine.memory()
    assert memory.base_weights == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.05)
    assert memory.slots == SLOTS * rig.engine.sizes.slot_bytes
