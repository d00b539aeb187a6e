"""What both sides of a comparison are given: the same arrivals, prompts and lengths; and what both report."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.jobs import Message

# Chosen so that at half load no burst fills 32 rows: what is measured is the pipeline, not a queue before the engine.
SEED = 3


class Load(BaseModel):
    """Jobs for a measurement. They go to the adapters in turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompt: str
    tokens: int
    # Open loop: so many jobs, arriving at random at a share of what the engine alone manages.
    jobs: int
    share: float
    # Saturation: so many jobs at once.
    saturating: int

    @property
    def messages(self) -> list[Message]:
        return [Message(role="user", content=self.prompt)]


class Measured(BaseModel):
    """What one side gave."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ttft_s: tuple[float, ...]
    tokens_per_s: float
    # Arrivals per second of the open loop.
    rate: float


def arrivals(load: Load, rate: float) -> list[float]:
    """When each job of the open loop comes, in seconds from its start: a Poisson process, the same every time."""
    dice = random.Random(SEED)
    times, now = [], 0.0
    for _ in range(load.jobs):
        now += dice.expovariate(rate)
        times.append(now)
    return times


async def open_loop(
    times: Sequence[float], first_token: Callable[[int], Coroutine[Any, Any, float]]
) -> tuple[float, ...]:
    """Start each job when it is due, whatever became of the others, and return every job's time to its first token.

    `first_token` runs a job to its end and returns when its first token came, on the loop's clock. Time counts from
    when a job was due, so that a late start is not forgiven.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    running: list[asyncio.Task[float]] = []
    async with asyncio.TaskGroup() as tasks:
        for place, due in enumerate(times):
            await asyncio.sleep(max(0.0, began + due - loop.time()))
            running.append(tasks.create_task(first_token(place)))
    return tuple(task.result() - began - due for task, due in zip(running, times, strict=True))
