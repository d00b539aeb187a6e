"""Members of a pool's consumer group, for tests in which nobody works: routers believe only who is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.kafka import clients
from infra.launch.stack import Stack
from schemas.topics import REQUESTS, requests_group

WAIT_S = 30.0


@asynccontextmanager
async def in_the_group(stack: Stack, pool: str, worker: str) -> AsyncIterator[None]:
    """A consumer that is known as this worker, and reads nothing."""
    consumer = clients.make_consumer(stack.kafka("admin"), requests_group(pool), worker)
    consumer.subscribe(topics=[REQUESTS.of(pool)])
    await clients.start(consumer)
    try:
        async with asyncio.timeout(WAIT_S):
            while not consumer.assignment():
                await asyncio.sleep(0.01)
        yield
    finally:
        await clients.stop(consumer)
