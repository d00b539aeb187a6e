"""One behaviour suite for every engine: subclass `EngineContract` and give it a `rig` fixture."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace

import pytest
import pytest_asyncio

from consumers.engines.protocol import (
    AdapterInUse,
    AdapterMissing,
    Artifact,
    EngineFault,
    FaultReason,
    LoadFailed,
    PromptInvalid,
    PromptTooLong,
    RequestInvalid,
    SlotsFull,
)
from schemas.jobs import Message
from schemas.replies import FinishReason
from tests.contracts.engine_host_suite import HostContract
from tests.contracts.engine_rig import CONTEXT_MAX, LONG_PROMPT, ROWS, SLOTS, Rig, mixed_batch
from tests.contracts.engine_step_suite import StepContract


class EngineContract(HostContract, StepContract):
    """What every engine must do. Each test starts with empty slots."""

    @pytest_asyncio.fixture(loop_scope="class", autouse=True)
    async def _empty_slots(self, rig: Rig) -> AsyncIterator[None]:
        yield
        for digest in rig.engine.resident():
            await rig.engine.unload(digest)
        for digest in rig.engine.staged():
            await rig.engine.unstage(digest)
        assert rig.engine.healthy()

    async def test_nothing_is_generated_before_an_explicit_load(self, rig: Rig) -> None:
        with pytest.raises(AdapterMissing):
            await rig.answer(rig.artifacts[0])

    async def test_an_answer_begins_with_the_marker_of_its_adapter(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:SLOTS])
        for artifact, marker in zip(rig.artifacts[:SLOTS], rig.markers, strict=False):
            assert (await rig.answer(artifact)).startswith(marker)

    async def test_batches_mix_adapters_exactly_where_the_build_is_recorded_to(self, rig: Rig) -> None:
        pairs = await mixed_batch(rig)
        assert all(together == alone for together, alone in pairs) == rig.engine.build.mixes_adapters

    async def test_more_requests_than_rows_all_end(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:2])
        picks = [i % 2 for i in range(ROWS + 12)]
        answers = await asyncio.gather(*(rig.answer(rig.artifacts[i], max_tokens=3) for i in picks))
        assert all(answer.startswith(rig.markers[i]) for i, answer in zip(picks, answers, strict=True))

    async def test_the_first_token_comes_alone_and_at_once(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        first, *rest = await rig.deltas(rig.artifacts[0], max_tokens=20)
        assert len(first.token_ids) == 1
        assert first.text == rig.markers[0]
        assert rest

    async def test_an_adapter_can_be_loaded_again_after_its_unload(self, rig: Rig) -> None:
        artifact = rig.artifacts[0]
        for _ in range(2):
            await rig.load(artifact)
            assert (await rig.answer(artifact)).startswith(rig.markers[0])
            await rig.engine.unload(artifact.digest)
            assert rig.engine.resident() == frozenset()
            with pytest.raises(AdapterMissing):
                await rig.answer(artifact)

    async def test_integer_ids_are_never_used_twice(self, rig: Rig) -> None:
        seen: set[int] = set()
        for artifact in (rig.artifacts[0], rig.artifacts[1], rig.artifacts[0]):
            await rig.load(artifact)
            listed = await rig.engine._backend.listed()
            assert not listed.slots & seen
            seen |= listed.slots
            await rig.engine.unload(artifact.digest)
        assert len(seen) == 3

    async def test_loading_a_resident_adapter_does_nothing(self, rig: Rig) -> None:
        first, again = [await rig.engine.load(rig.artifacts[0]) for _ in range(2)]
        assert first.bytes > 0
        assert again.duration_ms == 0
        assert rig.engine.resident() == {rig.artifacts[0].digest}

    async def test_unloading_what_is_not_resident_does_nothing(self, rig: Rig) -> None:
        await rig.engine.unload(rig.artifacts[0].digest)

    async def test_an_adapter_in_use_is_not_unloaded(self, rig: Rig) -> None:
        artifact = rig.artifacts[0]
        await rig.load(artifact)
        async with aclosing(rig.engine.generate(rig.request(artifact, max_tokens=100))) as stream:
            await anext(stream)
            with pytest.raises(AdapterInUse):
                await rig.engine.unload(artifact.digest)
            assert [delta async for delta in stream][-1].finish_reason is FinishReason.LENGTH

    async def test_full_slots_refuse_another_adapter_and_keep_serving(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:SLOTS])
        with pytest.raises(SlotsFull):
            await rig.load(rig.artifacts[SLOTS])
        assert (await rig.answer(rig.artifacts[0])).startswith(rig.markers[0])

    async def test_a_failed_load_leaves_nothing_behind(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        for _ in range(2):
            with pytest.raises(LoadFailed):
                await rig.load(rig.broken)
            with pytest.raises(AdapterMissing):
                await rig.answer(rig.broken)
        assert len((await rig.engine._backend.listed()).host) == 1
        await rig.load(*rig.artifacts[1:SLOTS])
        for artifact, marker in zip(rig.artifacts[:SLOTS], rig.markers, strict=False):
            assert (await rig.answer(artifact)).startswith(marker)

    async def test_a_path_without_the_digest_is_refused(self, rig: Rig) -> None:
        artifact = rig.artifacts[0]
        elsewhere = Artifact(digest=rig.zero.digest, path=artifact.path, rank=artifact.rank, bytes=artifact.bytes)
        with pytest.raises(LoadFailed):
            await rig.load(elsewhere)

    async def test_an_aborted_request_ends_without_a_finish_reason_and_alone(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:2])
        other = asyncio.ensure_future(rig.answer(rig.artifacts[1], max_tokens=60))
        deltas = []
        async for delta in rig.engine.generate(rig.request(rig.artifacts[0], request_id="victim", max_tokens=200)):
            deltas.append(delta)
            rig.engine.abort("victim")
        assert deltas[-1].finish_reason is None
        assert len(deltas) < 100
        assert await other == await rig.alone(rig.artifacts[1], "ba de fi", 60)

    async def test_aborting_an_unknown_request_is_no_error(self, rig: Rig) -> None:
        rig.engine.abort("nobody")

    async def test_closing_the_iterator_aborts_the_request(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        async with aclosing(rig.engine.generate(rig.request(rig.artifacts[0], max_tokens=200))) as stream:
            await anext(stream)
        await rig.engine.unload(rig.artifacts[0].digest)
        await rig.load(rig.artifacts[1])
        assert (await rig.answer(rig.artifacts[1])).startswith(rig.markers[1])
        assert len((await rig.engine._backend.listed()).host) == 1

    async def test_a_cancelled_task_aborts_its_request(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        task = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=200))
        await rig.answer(rig.artifacts[0], max_tokens=2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.engine.unload(rig.artifacts[0].digest)

    async def test_a_running_id_is_not_given_to_a_second_request(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        request = rig.request(rig.artifacts[0], request_id="one", max_tokens=50)
        async with aclosing(rig.engine.generate(request)) as stream:
            await anext(stream)
            with pytest.raises(RequestInvalid):
                await rig.answer(rig.artifacts[0], request_id="one")

    async def test_prefixes_are_shared_within_a_salt_and_digest_and_never_across(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:2])

        async def cached(artifact: Artifact, salt: str) -> int:
            return (await rig.deltas(artifact, LONG_PROMPT, cache_salt=salt, max_tokens=2))[0].cached_tokens

        assert await cached(rig.artifacts[0], "tenant a") == 0
        assert (await cached(rig.artifacts[0], "tenant a") > 0) == rig.caches_prefixes
        assert await cached(rig.artifacts[0], "tenant b") == 0
        assert await cached(rig.artifacts[1], "tenant a") == 0
        await rig.engine.reset_cache()
        assert await cached(rig.artifacts[0], "tenant a") == 0

    async def test_resetting_the_cache_disturbs_no_running_request(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        alone = await rig.alone(rig.artifacts[0], "ba de fi", 60)
        text = ""
        async for delta in rig.engine.generate(rig.request(rig.artifacts[0], max_tokens=60)):
            text += delta.text
            if len(text) < 40:
                await rig.engine.reset_cache()
        assert text == alone

    async def test_an_answer_is_cut_before_a_stop_string(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        whole = await rig.alone(rig.artifacts[0], "ba de fi", 12)
        stop = whole[9:13]
        deltas = await rig.deltas(rig.artifacts[0], max_tokens=12, stop=("never said", stop))
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
        assert deltas[-1].finish_reason is FinishReason.STOP

    async def test_a_seed_fixes_a_sampled_answer(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        first, again, other = [
            await rig.answer(rig.artifacts[0], temperature=1.0, seed=seed, max_tokens=20) for seed in (1, 1, 2)
        ]
        assert first == again
        assert first != other

    async def test_max_tokens_ends_an_answer(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        deltas = await rig.deltas(rig.artifacts[0], max_tokens=7)
        assert sum(len(delta.token_ids) for delta in deltas) == 7
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
        assert deltas[-1].finish_reason is FinishReason.LENGTH

    async def test_max_tokens_beyond_the_context_is_cut(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        prompt_tokens = len(rig.engine.encode(LONG_PROMPT))
        deltas = await rig.deltas(rig.artifacts[0], LONG_PROMPT, max_tokens=10_000)
        assert sum(len(delta.token_ids) for delta in deltas) == CONTEXT_MAX - prompt_tokens
        assert deltas[-1].finish_reason is FinishReason.LENGTH

    async def test_messages_are_encoded_in_the_chat_template(self, rig: Rig) -> None:
        assert rig.engine.encode([Message(role="user", content="ba de")]) == rig.chat_ids("ba de")

    async def test_prompts_that_cannot_be_answered_are_refused(self, rig: Rig) -> None:
        with pytest.raises(PromptInvalid):
            rig.engine.encode("")
        for times in (CONTEXT_MAX, 1_000_000):
            with pytest.raises(PromptTooLong):
                rig.engine.encode("ba " * times)

    async def test_loads_and_unloads_beside_a_stream_do_not_change_it(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        alone = await rig.alone(rig.artifacts[0], "ba de fi", 120)
        stream = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=120))
        for turn in range(9):
            index = 1 + turn % (len(rig.artifacts) - 1)
            await rig.load(rig.artifacts[index])
            assert (await rig.answer(rig.artifacts[index], max_tokens=2)).startswith(rig.markers[index])
            await rig.engine.unload(rig.artifacts[index].digest)
        assert await stream == alone

    async def test_concurrent_changes_never_exceed_the_slots(self, rig: Rig) -> None:
        results = await asyncio.gather(*(rig.engine.load(a) for a in rig.artifacts), return_exceptions=True)
        assert sum(isinstance(result, SlotsFull) for result in results) == len(rig.artifacts) - SLOTS
        assert len((await rig.engine._backend.listed()).slots) == SLOTS

    async def test_a_cancelled_load_is_whole_or_absent(self, rig: Rig) -> None:
        loading = asyncio.ensure_future(rig.engine.load(rig.artifacts[0]))
        await asyncio.sleep(0)
        loading.cancel()
        await rig.load(rig.artifacts[1])
        assert len((await rig.engine._backend.listed()).slots) == len(rig.engine.resident())

    async def test_a_token_that_the_base_does_not_know_is_refused_alone(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        beside = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=20))
        with pytest.raises(RequestInvalid):
            await anext(rig.engine.generate(replace(rig.request(rig.artifacts[0]), prompt_ids=(5, 10**6))))
        assert await beside == await rig.alone(rig.artifacts[0], "ba de fi", 20)

    async def test_nan_is_never_delivered_and_harms_nobody(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0], rig.zero, rig.poisoned)
        beside = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=60))
        for _ in range(3):
            with pytest.raises(EngineFault) as fault:
                await anext(rig.engine.generate(rig.request(rig.poisoned, LONG_PROMPT)))
            assert fault.value.reason is FaultReason.CORRUPTED
        assert await beside == await rig.alone(rig.artifacts[0], "ba de fi", 60)
        members = [rig.artifacts[0], rig.zero] * 12
        answers = await asyncio.gather(*(rig.answer(a, LONG_PROMPT, max_tokens=6) for a in members))
        assert answers == [await rig.alone(a, LONG_PROMPT, 6) for a in members]


class ThreadContract(EngineContract):
    """What an engine on a thread of this process can do beyond the others: survive a step that failed."""

    def failing_steps(self, rig: Rig) -> AbstractContextManager[None]:
        """Steps raise after they were begun."""
        raise NotImplementedError

    async def test_a_failed_step_costs_only_the_requests_in_it(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:2])
        with self.failing_steps(rig):
            failed = [rig.answer(artifact, LONG_PROMPT, max_tokens=5) for artifact in rig.artifacts[:2]]
            faults = await asyncio.gather(*failed, return_exceptions=True)
        assert [isinstance(fault, EngineFault) and fault.reason for fault in faults] == [FaultReason.STEP] * 2
        first, *_ = deltas = await rig.deltas(rig.artifacts[0], LONG_PROMPT, max_tokens=5)
        assert first.cached_tokens == 0
        assert "".join(delta.text for delta in deltas) == await rig.alone(rig.artifacts[0], LONG_PROMPT, 5)

    async def test_an_idle_engine_uses_no_processor(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        await rig.answer(rig.artifacts[0])
        began_s = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - began_s < 0.1
