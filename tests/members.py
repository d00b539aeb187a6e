"""Who is in a pool's consumer group: routers believe only who is there."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.kafka import clients
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.settings import EngineSettings
from schemas.topics import REQUESTS, requests_group

WAIT_S = 30.0


@asynccontextmanager
async def in_the_group(stack: Stack, pool: str, worker: str) -> AsyncIterator[None]:
    """A consumer that is known as this worker, and reads nothing: for tests in which nobody works."""
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


async def start_served(stack: Stack, worker: str, engine: EngineSettings, pool: str) -> Process:
    """Start a worker, and wait until every running router counts it: before that an interactive job is refused."""
    process = await asyncio.to_thread(stack.start_engine, worker, engine=engine, pool=pool)
    routers = [p for name, p in stack.processes.items() if name.startswith("router") and p.exit_code() is None]
    assert routers
    async with asyncio.timeout(WAIT_S):
        while not all(_counts(router, worker) for router in routers):
            await asyncio.sleep(0.02)
    return process


def _counts(router: Process, worker: str) -> bool:
    changes = [line for line in router.log.read_text().splitlines() if '"members.changed"' in line]
    return any(worker in json.loads(line)["fields"]["members"] for line in changes)
