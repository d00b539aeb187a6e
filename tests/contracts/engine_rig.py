"""What a contract test holds: an engine, and adapters whose answers can be told apart."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from consumers.engines.engine import SlotEngine
from consumers.engines.protocol import Artifact, Delta, EngineRequest

SLOTS = 4
ROWS = 32
CONTEXT_MAX = 256
WORDS = ["ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu"]
LONG_PROMPT = " ".join(WORDS[i % len(WORDS)] for i in range(100))

request_ids = count()


@dataclass(frozen=True, kw_only=True)
class Rig:
    """An engine with what a test needs to tell right from wrong."""

    engine: SlotEngine
    # More than there are slots; an answer under `artifacts[i]` begins with `markers[i]`.
    artifacts: Sequence[Artifact]
    markers: Sequence[str]
    zero: Artifact
    # Its load fails half-way.
    broken: Artifact
    # It loads, and its logits are NaN.
    poisoned: Artifact
    # Ids of these messages in the chat template, computed without the engine.
    chat_ids: Callable[[str], tuple[int, ...]]
    caches_prefixes: bool = True
    # Newcomers have their first token in a step without those who decode.
    prefills_apart: bool = False
    solo: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def request(self, artifact: Artifact, prompt: str = "ba de fi", **changes: Any) -> EngineRequest:
        """Any: the fields of a request."""
        fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "cache_salt": "salt"} | changes
        fields.setdefault("request_id", f"request-{next(request_ids)}")
        return EngineRequest(digest=artifact.digest, prompt_ids=self.engine.encode(prompt), **fields)

    async def deltas(self, artifact: Artifact, prompt: str = "ba de fi", **changes: Any) -> list[Delta]:
        return [delta async for delta in self.engine.generate(self.request(artifact, prompt, **changes))]

    async def answer(self, artifact: Artifact, prompt: str = "ba de fi", **changes: Any) -> str:
        return "".join(delta.text for delta in await self.deltas(artifact, prompt, **changes))

    async def alone(self, artifact: Artifact, prompt: str, max_tokens: int) -> str:
        """The answer with nothing beside it: what a mixed batch must reproduce."""
        key = (artifact.digest, prompt, max_tokens)
        if key not in self.solo:
            self.solo[key] = await self.answer(artifact, prompt, max_tokens=max_tokens, cache_salt=f"solo {key}")
        return self.solo[key]

    async def load(self, *artifacts: Artifact) -> None:
        for artifact in artifacts:
            await self.engine.load(artifact)


async def mixed_batch(rig: Rig) -> list[tuple[str, str]]:
    """(answer in a batch of 28 uneven rows over three adapters and the zero adapter, answer alone)."""
    members = [*rig.artifacts[:3], rig.zero]
    await rig.load(*members)
    rows = [(members[i % 4], " ".join(WORDS[: 1 + i % 13]), 3 + (7 * i) % 17) for i in range(28)]
    alone = [await rig.alone(*row) for row in rows]
    together = await asyncio.gather(
        *(rig.answer(a, p, max_tokens=n, cache_salt=f"mixed {i}") for i, (a, p, n) in enumerate(rows))
    )
    return list(zip(together, alone, strict=True))


def core_of(rig: Rig) -> Any:
    """Any: the inside of an engine that lives on a thread, for breaking it."""
    backend: Any = rig.engine._backend
    return backend._core
