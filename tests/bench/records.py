"""What the log took in while something was measured."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from schemas.record import Record, decode_one_of
from schemas.topics import Topic

Kind = TypeVar("Kind", bound=Record)
# A record and its time in the log, in milliseconds.
Dated = tuple[int, Kind]


@asynccontextmanager
async def records_since(stack: Stack, topics: Sequence[Topic]) -> AsyncIterator["Found"]:
    """Inside, `await found(kind)` gives every record of one type that came since the beginning."""
    settings = stack.kafka("admin")
    before = {topic.name: await end_offsets(settings, topic.name) for topic in topics}
    yield Found(stack, topics, before)


class Found:
    """Reads the same topics from the same places, as often as it is asked."""

    def __init__(self, stack: Stack, topics: Sequence[Topic], before: dict[str, dict[int, int]]) -> None:
        self._stack = stack
        self._topics = topics
        self._before = before

    async def __call__(self, kind: type[Kind]) -> list[Kind]:
        return [record for _, record in await self.dated(kind)]

    async def dated(self, kind: type[Kind]) -> list[Dated[Kind]]:
        found: list[Dated[Kind]] = []
        for topic in (topic for topic in self._topics if kind in topic.records):
            for partition, start in self._before[topic.name].items():
                async for record in read_range(self._stack.kafka("admin"), topic.name, partition, start):
                    entry = decode_one_of(topic.records, record.value)
                    if isinstance(entry, kind):
                        found.append((record.timestamp_ms, entry))
        return found
