"""How an engine dies, and that it never does so quietly. On the fake, which can be told to fail."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest

from consumers.engines.fake import Faults
from consumers.engines.protocol import Delta, EngineDead, EngineRequest, RequestInvalid
from tests.contracts.engine_rig import Rig, core_of
from tests.contracts.engine_rigs import fake_rig


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.running.set()


@pytest.fixture
async def rig(faults: Faults) -> AsyncIterator[Rig]:
    rig = fake_rig(faults, fake_step_ms=1.0, utility_timeout_s=0.2, step_timeout_s=0.1)
    await rig.engine.start()
    await rig.load(rig.artifacts[0])
    yield rig
    faults.running.set()
    await rig.engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # The engine's thread has no event for what a test waits for.
            await asyncio.sleep(0.001)


async def begun(rig: Rig) -> asyncio.Task[str]:
    """A request that has delivered its first token."""
    first = asyncio.Event()

    async def run() -> str:
        text = ""
        async for delta in rig.engine.generate(rig.request(rig.artifacts[0], max_tokens=200)):
            text += delta.text
            first.set()
        return text

    task = asyncio.ensure_future(run())
    await first.wait()
    return task


async def test_a_step_that_cannot_be_recovered_from_ends_every_request(rig: Rig, faults: Faults) -> None:
    running = [await begun(rig), await begun(rig)]
    faults.fatal, faults.step_errors = True, 1
    for task in running:
        with pytest.raises(EngineDead):
            await task
    assert not rig.engine.healthy()
    with pytest.raises(EngineDead):
        await rig.load(rig.artifacts[1])
    with pytest.raises(EngineDead):
        await rig.answer(rig.artifacts[0])


async def test_a_load_that_never_returns_ends_the_engine(rig: Rig, faults: Faults) -> None:
    task = await begun(rig)
    faults.load_hangs.add(rig.artifacts[1].digest)
    faults.running.clear()
    with pytest.raises(EngineDead, match="did not return"):
        await rig.load(rig.artifacts[1])
    with pytest.raises(EngineDead):
        await task
    assert not rig.engine.healthy()


async def test_an_adapter_that_stays_after_its_removal_ends_the_engine(rig: Rig, faults: Faults) -> None:
    faults.remove_fails.add(rig.artifacts[0].digest)
    with pytest.raises(EngineDead, match="could not be removed"):
        await rig.engine.unload(rig.artifacts[0].digest)
    assert not rig.engine.healthy()


async def test_an_adapter_lost_behind_our_back_ends_the_engine_at_the_next_change(rig: Rig) -> None:
    core_of(rig)._bytes.clear()
    with pytest.raises(EngineDead):
        await rig.load(rig.artifacts[1])


async def test_a_stuck_step_shows_as_unhealthy(rig: Rig, faults: Faults) -> None:
    task = await begun(rig)
    faults.running.clear()
    await until(lambda: not rig.engine.healthy())
    faults.running.set()
    await task
    assert rig.engine.healthy()


async def test_stopping_ends_requests_and_may_be_done_twice(rig: Rig) -> None:
    task = await begun(rig)
    await rig.engine.stop()
    with pytest.raises(EngineDead, match="stopped"):
        await task
    await rig.engine.stop()
    assert not rig.engine.healthy()


async def test_an_engine_that_does_not_start_is_dead() -> None:
    rig = fake_rig(Faults())
    core_of(rig)._bytes[7] = 1
    with pytest.raises(EngineDead, match="did not start"):
        await rig.engine.start()
    assert not rig.engine.healthy()
    await rig.engine.stop()


async def test_nothing_works_before_the_start() -> None:
    rig = fake_rig(Faults())
    assert not rig.engine.healthy()
    for call in (rig.load(rig.artifacts[0]), rig.engine.reset_cache(), rig.answer(rig.artifacts[0])):
        with pytest.raises(EngineDead):
            await call
    await rig.engine.stop()


async def test_rows_take_their_steps_together(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(*(rig.answer(rig.artifacts[0], max_tokens=100) for _ in range(32)))
    assert 0.1 <= loop.time() - began_s < 32 * 0.1


async def test_a_failed_step_does_not_fail_a_request_that_was_not_in_it(rig: Rig, faults: Faults) -> None:
    faults.running.clear()
    running = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=5))
    await asyncio.sleep(0)
    faults.step_errors = 1
    await until(lambda: bool(core_of(rig)._rows))
    late = asyncio.ensure_future(rig.answer(rig.artifacts[0], max_tokens=5))
    await asyncio.sleep(0)
    faults.running.set()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], Exception)
    assert (await late).startswith(rig.markers[0])


@pytest.mark.parametrize("missing", ["request_id", "digest", "cache_salt", "prompt_ids", "max_tokens"])
def test_a_request_without_one_of_its_parts_cannot_be_made(missing: str) -> None:
    whole = EngineRequest(request_id="r", digest="d", cache_salt="s", prompt_ids=(1,), max_tokens=1)
    with pytest.raises(RequestInvalid):
        replace(whole, **{missing: type(getattr(whole, missing))()})


async def test_deltas_of_a_request_that_is_over_go_nowhere(rig: Rig) -> None:
    rig.engine._deliver([("long gone", Delta(text="x", token_ids=(1,)))])
    assert rig.engine.healthy()
