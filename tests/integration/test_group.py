"""The one loop, on a real Kafka."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from infra.clock import SystemClock
from infra.kafka.group import Group
from infra.kafka.lane import Lane
from infra.kafka.publisher import Publisher
from infra.kafka.records import Outgoing
from infra.launch.stack import Stack

WAIT_S = 30.0


async def hear(lanes: Sequence[Lane]) -> None:
    """Nothing to do."""
    assert lanes


@pytest.mark.parametrize("polls", [0, 1, 3])
async def test_topics_may_be_added_while_the_group_is_still_forming(
    stack: Stack, tenant: Callable[[], str], polls: int
) -> None:
    """A subscription that interrupts a rebalance ends aiokafka's coordination without a word."""
    topics = [f"jobs.{tenant()}" for _ in range(3)]
    group = Group(stack.kafka("router"), f"forming-{polls}", hear, hear)
    publisher = Publisher(stack.kafka("admin"), "test", SystemClock())
    await publisher.start()
    await publisher.send_all([Outgoing(topic=topic, key=b"k", value=b"v") for topic in topics])
    try:
        await group.start(topics[:1])
        read: set[str] = set()
        for number in (2, 3):
            for _ in range(polls):
                read |= {lane.topic for lane in await group.poll(10)}
            group.subscribe(topics[:number])
        async with asyncio.timeout(WAIT_S):
            while read != set(topics):
                read |= {lane.topic for lane in await group.poll(100)}
    finally:
        await group.stop()
        await publisher.stop()
