"""Adapters come and go between every two steps of the real engine, and no answer beside them changes."""

import asyncio
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from consumers.engines.protocol import Artifact, Loaded
from consumers.engines.select import engine_environment
from schemas.audit import LoadSource
from tests.contracts.engine_rig import SLOTS, Rig, core_of
from tests.contracts.engine_rigs import real_rig

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

TOKENS = 240
# One slot stays free, and the others take turns in it.
PROMPTS = ("ba de fi", "go ku la me", "ni po ru sa te")


class Turnstile:
    """Lets the engine take one step at a time, so that whatever the test does lies between exactly two of them."""

    def __init__(self, core: Any, patch: pytest.MonkeyPatch) -> None:
        """Any: the inside of an engine that lives on a thread."""
        self.steps = 0
        self._allowed = 0
        self._stepped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._busy, self._step = core.busy, core.step
        patch.setattr(core, "busy", self._may_step)
        patch.setattr(core, "step", self._counted)

    async def step(self, rig: Rig) -> None:
        self._stepped.clear()
        self._allowed += 1
        # The thread sleeps until it has a command: this one changes nothing.
        rig.engine.abort("nobody")
        await rig.engine._backend.listed()
        await self._stepped.wait()

    def _may_step(self) -> bool:
        return bool(self._busy()) and self.steps < self._allowed

    def _counted(self) -> Any:
        """Any: the outputs, which are none of ours."""
        outputs = self._step()
        self.steps += 1
        self._loop.call_soon_threadsafe(self._stepped.set)
        return outputs


def turns(others: list[Artifact]) -> Iterator[tuple[Artifact, LoadSource, bool]]:
    """What is loaded next, where it must come from, and whether its copy in host memory is kept afterwards."""
    for artifact in cycle(others):
        yield artifact, LoadSource.STORE, True
        yield artifact, LoadSource.HOST, False


async def change(rig: Rig, artifact: Artifact, keep: bool) -> Loaded:
    """One load and one unload of an adapter that nobody uses."""
    before = rig.engine.resident()
    loaded = await rig.engine.load(artifact)
    assert rig.engine.resident() == before | {artifact.digest}
    await rig.engine.unload(artifact.digest, keep=keep)
    assert rig.engine.resident() == before
    return loaded


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        yield patch


async def test_a_load_and_an_unload_between_every_two_steps_change_no_answer(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    rig = real_rig("vllm", tmp_path)
    await rig.engine.start()
    members, others = list(rig.artifacts[: SLOTS - 1]), [*rig.artifacts[SLOTS - 1 :], rig.zero]
    await rig.load(*members)
    alone = [await rig.alone(*row, TOKENS) for row in zip(members, PROMPTS, strict=True)]
    ids = [rig.engine._residents.id_of(artifact.digest) for artifact in members]

    gate = Turnstile(core_of(rig), environment)
    streams = [
        asyncio.ensure_future(rig.deltas(artifact, prompt, max_tokens=TOKENS))
        for artifact, prompt in zip(members, PROMPTS, strict=True)
    ]
    changes = 0
    for artifact, source, keep in turns(others):
        loaded = await change(rig, artifact, keep)
        assert loaded.source is source
        changes += 1
        if all(stream.done() for stream in streams):
            break
        await gate.step(rig)
    answers = [stream.result() for stream in streams]
    assert changes == gate.steps + 1, "one load and one unload before, between and after the steps"
    assert TOKENS <= gate.steps <= TOKENS + len(PROMPTS)
    for deltas, expected, marker in zip(answers, alone, rig.markers, strict=False):
        assert "".join(delta.text for delta in deltas) == expected
        assert expected.startswith(marker)
        assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
    # What a receipt rests on: the integer under which the engine holds a digest's weights.
    assert [rig.engine._residents.id_of(artifact.digest) for artifact in members] == ids
    assert (await rig.engine._backend.listed()).slots == frozenset(ids)
    await rig.engine.stop()
