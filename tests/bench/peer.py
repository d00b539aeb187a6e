"""The peer of the whole pipeline: the same engine, called in process, with nothing around it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from consumers.engines.protocol import Artifact, Delta, Engine, EngineKind, EngineRequest, EngineSettings
from consumers.engines.select import engine_environment, make_engine
from infra.process import apply_environment
from tests.bench.figures import middle_rate
from tests.bench.loads import Load, Measured, arrivals, open_loop

_requests = count(1)


class PeerTask(BaseModel):
    """Which engine, which adapters and which load."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: EngineKind
    settings: EngineSettings
    artifacts: tuple[Artifact, ...]
    load: Load


class Caller:
    """Calls an engine as a program would that had it for itself."""

    def __init__(self, engine: Engine, task: PeerTask) -> None:
        self._engine = engine
        self._task = task
        self._loop = asyncio.get_running_loop()
        self.taken: list[tuple[float, int]] = []

    async def deltas(self, place: int) -> AsyncIterator[Delta]:
        load, artifacts = self._task.load, self._task.artifacts
        digest = artifacts[place % len(artifacts)].digest
        request = EngineRequest(
            request_id=str(next(_requests)),
            digest=digest,
            prompt_ids=self._engine.encode(load.messages),
            max_tokens=load.tokens,
            cache_salt=digest,
            temperature=0.0,
        )
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                self.taken.append((self._loop.time(), len(delta.token_ids)))
                yield delta

    async def first_token(self, place: int) -> float:
        came = None
        async for _ in self.deltas(place):
            came = came or self._loop.time()
        assert came is not None
        return came

    async def saturate(self) -> tuple[float, float]:
        """Tokens per second, and jobs per second of that length."""
        self.taken.clear()
        jobs = self._task.load.saturating
        await asyncio.gather(*(self.first_token(place) for place in range(jobs)))
        tokens_per_s = middle_rate(self.taken)
        return tokens_per_s, tokens_per_s * jobs / sum(tokens for _, tokens in self.taken)


async def measure(task: PeerTask) -> Measured:
    engine = make_engine(task.kind, task.settings)
    await engine.start()
    try:
        for artifact in task.artifacts:
            await engine.load(artifact)
        caller = Caller(engine, task)
        for place in range(len(task.artifacts)):
            await caller.first_token(place)
        tokens_per_s, jobs_per_s = await caller.saturate()
        rate = jobs_per_s * task.load.share
        ttft_s = await open_loop(arrivals(task.load, rate), caller.first_token)
    finally:
        await engine.stop()
    return Measured(ttft_s=ttft_s, tokens_per_s=tokens_per_s, rate=rate)


def main() -> None:
    asked, answered = map(Path, sys.argv[1:])
    apply_environment(engine_environment())
    measured = asyncio.run(measure(PeerTask.model_validate_json(asked.read_bytes())))
    answered.write_text(measured.model_dump_json())


if __name__ == "__main__":
    main()
