"""The peer of the router: a bare aiokafka loop with the router's input and output, that decides nothing."""

import asyncio
import sys
from pathlib import Path

from aiokafka import AIOKafkaProducer
from pydantic import BaseModel, ConfigDict

from infra.kafka import clients
from infra.kafka.records import Outgoing
from infra.redis import connect
from infra.settings import KafkaSettings, RedisSettings

LIMIT_S = 120.0
POLL_MS = 100
FUNCTION = "switchyard_bench_nothing"
LIBRARY = f"#!lua name=switchyard_bench\nredis.register_function('{FUNCTION}', function() return 1 end)\n"


class Sample(BaseModel):
    """A record that the router wrote: the loop writes it again for every job."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    topic: str
    key: str
    value: str
    headers: tuple[tuple[str, str], ...]
    partition: int

    def outgoing(self) -> Outgoing:
        return Outgoing(
            topic=self.topic,
            key=self.key.encode(),
            value=self.value.encode(),
            headers=tuple((name, value.encode()) for name, value in self.headers),
            partition=self.partition,
        )


class BareTask(BaseModel):
    """Drain so many records of a topic, each into one audit record and one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kafka: KafkaSettings
    redis: RedisSettings
    group: str
    topic: str
    records: int
    batch: int
    audit: Sample
    request: Sample


class Drained(BaseModel):
    """How many records were drained."""

    records: int


async def drain(task: BareTask) -> Drained:
    consumer = clients.make_consumer(task.kafka, task.kafka.group(task.group))
    producer = clients.make_producer(task.kafka)
    redis = connect(task.redis)
    audit, request = task.audit.outgoing(), task.request.outgoing()
    done = 0
    try:
        await clients.start(producer)
        consumer.subscribe(topics=[task.topic])
        await clients.start(consumer)
        while done < task.records:
            polled = await consumer.getmany(timeout_ms=POLL_MS, max_records=task.batch)
            for place, records in polled.items():
                await asyncio.gather(*(redis.fcall(FUNCTION, 0) for _ in records))
                await append(producer, audit, len(records))
                await append(producer, request, len(records))
                await consumer.commit({place: records[-1].offset + 1})
                done += len(records)
    finally:
        await redis.aclose()
        await clients.stop(consumer)
        await clients.stop(producer)
    return Drained(records=done)


async def append(producer: AIOKafkaProducer, record: Outgoing, copies: int) -> None:
    waiting = [
        await producer.send(
            record.topic,
            value=record.value,
            key=record.key,
            partition=record.partition,
            headers=list(record.headers),
        )
        for _ in range(copies)
    ]
    await asyncio.gather(*waiting)


async def _within_limit(task: BareTask) -> Drained:
    async with asyncio.timeout(LIMIT_S):
        return await drain(task)


def main() -> None:
    asked, answered = map(Path, sys.argv[1:])
    drained = asyncio.run(_within_limit(BareTask.model_validate_json(asked.read_bytes())))
    answered.write_text(drained.model_dump_json())


if __name__ == "__main__":
    main()
