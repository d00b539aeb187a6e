"""Chunks on their way to `stream.<tenant>`: the first token at once, then what gathers meanwhile."""

import asyncio
from collections import deque

from consumers.engines.protocol import Delta
from consumers.worker.plan import Entry
from infra.kafka.publisher import Publisher, acknowledged
from infra.kafka.records import Headers
from infra.metrics import Metrics
from schemas.replies import TokensGenerated
from schemas.topics import STREAM

# Chunks gather this long: short enough to read as a stream, long enough that 32 rows do not cost 32 records a step.
GATHER_S = 0.03
# Beyond this many unacknowledged chunks of one job, its stream waits for the broker.
UNACKNOWLEDGED_MAX = 256


class Chunks:
    """The chunks of one execution."""

    def __init__(self, streams: "Streams", entry: Entry, attempt: int, carried: Headers) -> None:
        self.sent = 0
        self._streams = streams
        self._entry = entry
        self._attempt = attempt
        self._carried = carried
        self._text: list[str] = []
        self._tokens = 0
        self._unacknowledged: deque[asyncio.Future[object]] = deque()
        # Numbers and order of appending must agree.
        self._lock = asyncio.Lock()

    async def add(self, delta: Delta) -> None:
        """Take what the engine produced. The first of it leaves now."""
        self._text.append(delta.text)
        self._tokens += len(delta.token_ids)
        if self.sent == 0:
            await self.flush()
        else:
            self._streams.gather(self)

    async def flush(self) -> None:
        async with self._lock:
            if not self._tokens:
                return
            record = TokensGenerated(
                job_id=self._entry.route.job_id,
                attempt=self._attempt,
                seq=self.sent,
                text="".join(self._text),
                tokens=self._tokens,
            )
            self._text, self._tokens = [], 0
            self.sent += 1
            self._unacknowledged.append(await self._streams.send(self._entry, record, self._carried))
            while self._unacknowledged and self._unacknowledged[0].done():
                await acknowledged(self._unacknowledged.popleft())
            if len(self._unacknowledged) > UNACKNOWLEDGED_MAX:
                await acknowledged(self._unacknowledged.popleft())

    async def close(self) -> int:
        """Send the rest and wait until every chunk is acknowledged. Returns how many there were."""
        await self.flush()
        await asyncio.gather(*(acknowledged(future) for future in self._unacknowledged))
        self._unacknowledged.clear()
        return self.sent


class Streams:
    """One task that flushes the chunks of all jobs together."""

    def __init__(self, publisher: Publisher, metrics: Metrics) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._gathering: set[Chunks] = set()
        self._some = asyncio.Event()

    def gather(self, chunks: Chunks) -> None:
        self._gathering.add(chunks)
        self._some.set()

    async def send(self, entry: Entry, record: TokensGenerated, carried: Headers) -> "asyncio.Future[object]":
        topic = STREAM.of(entry.route.identity.tenant)
        self._metrics.count("chunks_sent")
        self._metrics.count("tokens_generated", record.tokens)
        return await self._publisher.enqueue(
            self._publisher.outgoing(topic, record.job_id, record, subject=entry.digest, extra=carried)
        )

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(GATHER_S)
            self._some.clear()
            gathered, self._gathering = self._gathering, set()
            await asyncio.gather(*(chunks.flush() for chunks in gathered))
