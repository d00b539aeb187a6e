"""What every engine must do with copies of adapters in host memory, and tell of its memory."""

from dataclasses import replace

import pytest

from consumers.engines.protocol import AdapterInUse, AdapterMissing, HostFull
from schemas.audit import LoadSource
from tests.contracts.engine_rig import LONG_PROMPT, SLOTS, Rig


class HostContract:
    """Each test starts without a copy; mixed into `EngineContract`, whose fixture sees to it."""

    async def test_a_copy_in_host_memory_takes_no_slot_and_serves_nobody(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:SLOTS])
        staged = await rig.engine.stage(rig.artifacts[SLOTS])
        assert staged.bytes > 0
        assert (await rig.engine.stage(rig.artifacts[SLOTS])).duration_ms == 0
        assert rig.engine.resident() == {artifact.digest for artifact in rig.artifacts[:SLOTS]}
        assert rig.engine.staged() == {artifact.digest for artifact in rig.artifacts[: SLOTS + 1]}
        with pytest.raises(AdapterMissing):
            await rig.answer(rig.artifacts[SLOTS])

    async def test_an_adapter_comes_back_from_host_memory_with_the_same_answers(self, rig: Rig) -> None:
        first, second = rig.artifacts[:2]
        await rig.load(first)
        before = await rig.answer(first, cache_salt="before")
        await rig.engine.unload(first.digest, keep=True)
        assert not rig.engine.resident()
        assert rig.engine.staged() == {first.digest}
        await rig.load(second)
        assert (await rig.answer(second)).startswith(rig.markers[1])
        loaded = await rig.engine.load(first)
        assert loaded.source is LoadSource.HOST
        assert await rig.answer(first, cache_salt="after") == before

    async def test_a_copy_in_a_slot_is_not_unstaged(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        with pytest.raises(AdapterInUse):
            await rig.engine.unstage(rig.artifacts[0].digest)
        await rig.engine.unload(rig.artifacts[0].digest, keep=True)
        await rig.engine.unstage(rig.artifacts[0].digest)
        assert not (await rig.engine._backend.listed()).host

    async def test_copies_beyond_the_host_bytes_are_refused_and_nothing_is_lost(self, rig: Rig) -> None:
        first = await rig.engine.stage(rig.artifacts[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.engine._residents, "_settings", replace(rig.engine._settings, host_bytes=first.bytes))
            with pytest.raises(HostFull):
                await rig.engine.stage(rig.artifacts[1])
            assert len((await rig.engine._backend.listed()).host) == 1
            await rig.engine.unstage(rig.artifacts[0].digest)
            await rig.load(rig.artifacts[1])

    async def test_bytes_are_predicted_from_rank_and_modules_within_five_percent(self, rig: Rig) -> None:
        for artifact in rig.artifacts[:3]:
            rig.engine.sizes.measured.clear()
            predicted = rig.engine.sizes.predicted(artifact.rank, artifact.target_modules)
            staged = await rig.engine.stage(artifact)
            assert predicted == pytest.approx(staged.bytes, rel=0.05)
            assert rig.engine.sizes.predicted(artifact.rank, artifact.target_modules) == staged.bytes

    async def test_memory_is_accounted_for_while_adapters_come_and_go(self, rig: Rig) -> None:
        empty = await rig.engine.memory()
        assert (empty.host_cache, empty.slots_used, empty.staging) == (0, 0, 0)
        for turn in range(12):
            artifact = rig.artifacts[turn % SLOTS]
            loaded = await rig.engine.load(artifact)
            await rig.answer(artifact, LONG_PROMPT, max_tokens=3)
            memory = await rig.engine.memory()
            assert memory.host_cache >= loaded.bytes
            assert abs(memory.unexplained) <= 0.05 * memory.process
            await rig.engine.unload(artifact.digest, keep=turn % 2 == 0)
        assert memory.process < memory.limit
