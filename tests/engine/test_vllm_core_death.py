"""vLLM in its own processes dies loudly: nobody waits for a core that is gone."""

import asyncio
import multiprocessing
import signal
from os import kill
from pathlib import Path

import pytest

from consumers.engines.protocol import EngineDead
from consumers.engines.select import engine_environment
from tests.contracts.engine_rigs import real_rig

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def core_process() -> int:
    core = next(child for child in multiprocessing.active_children() if "EngineCore" in child.name)
    assert core.pid is not None
    return core.pid


async def test_a_killed_core_ends_its_streams_and_the_calls_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    rig = real_rig("vllm-async", tmp_path)
    await rig.engine.start()
    await rig.load(rig.artifacts[0])
    stream = rig.engine.generate(rig.request(rig.artifacts[0], max_tokens=200))
    await anext(stream)
    pid = core_process()
    kill(pid, signal.SIGSTOP)
    loading = asyncio.ensure_future(rig.engine.load(rig.artifacts[1]))
    await asyncio.wait({loading}, timeout=0.2)
    assert not loading.done()
    kill(pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineDead):
            await loading
        with pytest.raises(EngineDead):
            [delta async for delta in stream]
    assert not rig.engine.healthy()
    await rig.engine.stop()
