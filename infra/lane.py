"""Ways to Redis that many calls share. On a lane each is sent at once, and answered in the order of sending.

This is the protocol's pipelining (redis.io, "Redis pipelining"), without a round of calls that must be over before the
next begins. redis-py gives a connection to one call at a time, which costs a client three times as much as the call.
"""

import asyncio
import math
from collections import deque
from typing import Any, Final

from redis import exceptions
from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.connection import AbstractConnection

Word = str | bytes | int

# A call that heard nothing for so long is answered by nobody, and neither is what was sent behind it.
ANSWER_S: Final = 2.0
# Calls in one trip to a cluster.
TRIP_CALLS_MAX: Final = 100


def server_left(connection: AbstractConnection) -> bool:
    """Whether nobody is at the other end of a connection that was open."""
    reader = connection._reader  # noqa: SLF001 - redis-py has no public word for it
    return reader is None or reader.at_eof() or reader.exception() is not None


class Lane:
    """Calls over one connection of a pool. It connects with the first call, and anew with the next after a failure.

    A caller that is cancelled leaves its call to run: the answer is read, and given to nobody.
    """

    def __init__(self, pool: ConnectionPool, answer_s: float = ANSWER_S) -> None:
        self._pool = pool
        self._answer_s = answer_s
        self._life: _Life | None = None

    async def call(self, *words: Word) -> Any:
        """The answer, or the RedisError in its place: of a call without an answer nobody knows whether it happened."""
        if self._life is None or self._life.is_over:
            self._life = _Life(self._pool, self._answer_s)
        return await self._life.call(words)

    async def close(self) -> None:
        """End the connection. Calls on their way are told so."""
        if self._life is not None:
            await self._life.close()


class _Life:
    """One connection, from its opening to what ends it: that is the answer to all that wait then."""

    def __init__(self, pool: ConnectionPool, answer_s: float) -> None:
        self._over = False
        self._connection: AbstractConnection | None = None
        self._pool = pool
        self._answer_s = answer_s
        self._unsent: list[tuple[Word, ...]] = []
        self._some = asyncio.Event()
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.Handle | None = None
        self._task = asyncio.create_task(self._live())

    @property
    def is_over(self) -> bool:
        """Also when the server has just left and the receiver was not told: what is sent to nobody is in doubt."""
        return self._over or (self._connection is not None and server_left(self._connection))

    async def call(self, words: tuple[Word, ...]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        ends_at = loop.time() + self._answer_s
        self._waiting.append((answer, ends_at))
        self._unsent.append(words)
        self._some.set()
        if self._watch is None:
            self._watch = loop.call_at(ends_at, self._look)
        return await answer

    async def close(self) -> None:
        self._end(exceptions.ConnectionError("the client was closed"))
        await asyncio.wait([self._task])

    async def _live(self) -> None:
        error: exceptions.RedisError = exceptions.ConnectionError("the connection was closed")
        try:
            self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            await self._travel(self._connection)
        except exceptions.RedisError as raised:
            error = raised
        finally:
            self._end(error)

    async def _travel(self, connection: AbstractConnection) -> None:
        # Time is watched here, for all calls at once: redis-py would start a task for every sending.
        timeout_s, connection.socket_timeout = connection.socket_timeout, None
        sender = asyncio.create_task(self._send(connection))
        try:
            await self._receive(connection)
        finally:
            sender.cancel()
            connection.socket_timeout = timeout_s
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, connection: AbstractConnection) -> None:
        """What was asked since the last time goes out together. That a connection broke is the receiver's to notice."""
        while True:
            await self._some.wait()
            self._some.clear()
            calls, self._unsent = self._unsent, []
            packed = [part for words in calls for part in connection.pack_command(*words)]
            await connection.send_packed_command(packed, check_health=False)

    async def _receive(self, connection: AbstractConnection) -> None:
        while True:
            try:
                answer = await connection.read_response(timeout=math.inf)
            except exceptions.ResponseError as refusal:
                answer = refusal
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_result(answer)

    def _look(self) -> None:
        self._watch = None
        if self._waiting:
            loop = asyncio.get_running_loop()
            first, ends_at = self._waiting[0]
            if ends_at > loop.time():
                self._watch = loop.call_at(ends_at, self._look)
            else:
                # A process that stood still has answers to read: the receiver has its turn before this.
                self._watch = loop.call_soon(self._give_up, first)

    def _give_up(self, first: asyncio.Future[Any]) -> None:
        if self._waiting and self._waiting[0][0] is first:
            self._end(exceptions.TimeoutError(f"no answer within {self._answer_s:g} s"))
        else:
            self._look()

    def _end(self, error: exceptions.RedisError) -> None:
        if self._over:
            return
        self._over = True
        self._task.cancel()
        for future, _ in self._waiting:
            if not future.done():
                future.set_result(error)


class Trips:
    """A way to a cluster, whose client finds the primary of a key: a trip takes what was asked before its departure.

    A caller that is cancelled leaves its call to the others. A call alone goes without a pipeline, which costs a client
    half as much again.
    """

    def __init__(self, redis: RedisCluster) -> None:
        self._redis = redis
        self._waiting: list[tuple[tuple[Word, ...], asyncio.Future[Any]]] = []
        self._trips: set[asyncio.Task[None]] = set()

    async def call(self, *words: Word) -> Any:
        """The answer, or the RedisError in its place."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((words, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._depart)
        return await answer

    async def close(self) -> None:
        """Wait for the trips on their way."""
        await asyncio.gather(*self._trips, return_exceptions=True)

    def _depart(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), TRIP_CALLS_MAX):
            trip = asyncio.create_task(self._travel(waiting[first : first + TRIP_CALLS_MAX]))
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)

    async def _travel(self, calls: list[tuple[tuple[Word, ...], asyncio.Future[Any]]]) -> None:
        answers: list[Any] = [exceptions.RedisError("the call was given up")] * len(calls)
        try:
            answers = await self._answers([words for words, _ in calls])
        except exceptions.RedisError as error:
            answers = [error] * len(calls)
        finally:
            for (_, answer), given in zip(calls, answers, strict=True):
                if not answer.done():
                    answer.set_result(given)

    async def _answers(self, calls: list[tuple[Word, ...]]) -> list[Any]:
        if len(calls) == 1:
            return [await self._redis.execute_command(*calls[0])]
        pipeline = self._redis.pipeline(transaction=False)
        for words in calls:
            pipeline.execute_command(*words)
        return await pipeline.execute(raise_on_error=False)
