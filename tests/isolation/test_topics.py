"""Topics: Kafka itself keeps tenants apart."""

import asyncio

import pytest

from infra.kafka.tail import end_offsets
from schemas.topics import BATCH, CANCEL, JOBS, REPLIES, STREAM
from tests.integration.test_acls import refusal, write
from tests.isolation.house import NORTH, SOUTH, House
from tests.isolation.notes import Note

pytestmark = pytest.mark.asyncio(loop_scope="package")

NOT_ALLOWED = "TOPIC_AUTHORIZATION_FAILED"


async def test_another_tenants_topics(house: House, note: Note) -> None:
    south = house.stack.kafka(SOUTH)
    topics = [topic.of(NORTH) for topic in (JOBS, BATCH, CANCEL, STREAM, REPLIES)]
    before = {topic: await end_offsets(house.stack.kafka("admin"), topic) for topic in topics}
    for topic in topics:
        error = await asyncio.to_thread(write, south, topic)
        assert error is not None
        assert error.name() == NOT_ALLOWED
        assert await asyncio.to_thread(refusal, south, topic) == NOT_ALLOWED
    # One that does not exist is answered the same: there is nothing to learn.
    nowhere = await asyncio.to_thread(write, south, "jobs.nobody")
    assert nowhere is not None
    assert nowhere.name() == NOT_ALLOWED
    after = {topic: await end_offsets(house.stack.kafka("admin"), topic) for topic in topics}
    assert after == before
    note(
        "another tenant's topics: produce and consume",
        f"{NOT_ALLOWED}, as for one that does not exist",
        "no record: the ends of all five topics did not move",
    )
