"""What every engine must tell of the steps in which requests had their first token."""

import asyncio
from collections import defaultdict
from contextlib import aclosing

from consumers.engines.protocol import Delta
from tests.contracts.engine_rig import LONG_PROMPT, ROWS, Rig


class StepContract:
    """Mixed into `EngineContract`, whose fixture empties the slots."""

    async def test_a_request_alone_had_its_first_step_alone_and_only_its_first_delta_says_so(self, rig: Rig) -> None:
        await rig.load(rig.artifacts[0])
        numbers = []
        for _ in range(2):
            first, *rest = await rig.deltas(rig.artifacts[0])
            assert first.batch is not None
            assert (first.batch.rows, first.batch.adapters) == (1, 1)
            assert [delta.batch for delta in rest] == [None] * len(rest)
            numbers.append(first.batch.number)
        assert numbers[0] < numbers[1]

    async def test_a_step_counts_those_who_had_a_token_of_it_and_their_adapters(self, rig: Rig) -> None:
        """Each has one token, so that a step's rows are those whose deltas name it. Some need several to read all."""
        members = [*rig.artifacts[:3], rig.zero]
        await rig.load(*members)
        picks = [members[i % 4] for i in range(ROWS + 8)]
        rows = [
            rig.deltas(artifact, LONG_PROMPT if i % 3 else "ba de fi", max_tokens=1, cache_salt=f"step {i}")
            for i, artifact in enumerate(picks)
        ]
        digests: defaultdict[int, list[str]] = defaultdict(list)
        told: dict[int, tuple[int, int]] = {}
        for artifact, (delta,) in zip(picks, await asyncio.gather(*rows), strict=True):
            assert delta.batch is not None
            digests[delta.batch.number].append(artifact.digest)
            told.setdefault(delta.batch.number, (delta.batch.rows, delta.batch.adapters))
            assert told[delta.batch.number] == (delta.batch.rows, delta.batch.adapters)
        assert told == {number: (len(step), len(set(step))) for number, step in digests.items()}
        assert any(rows > 1 < adapters for rows, adapters in told.values())

    async def test_who_decodes_is_company_to_who_comes_until_it_ends(self, rig: Rig) -> None:
        await rig.load(*rig.artifacts[:2])

        async def company() -> tuple[int, int]:
            first: Delta = (await rig.deltas(rig.artifacts[1], max_tokens=1))[0]
            assert first.batch is not None
            return first.batch.rows, first.batch.adapters

        async with aclosing(rig.engine.generate(rig.request(rig.artifacts[0], max_tokens=200))) as decoding:
            await anext(decoding)
            assert await company() == ((1, 1) if rig.prefills_apart else (2, 2))
        assert await company() == (1, 1)
