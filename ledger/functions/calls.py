"""Loading the function library, and calling one function of it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from ledger import keys
from ledger.rows import Row
from schemas.errors import SwitchyardError

# One library: the files in this order.
FILES = ("checks", "spending", "places", "leases", "runs", "books")
# A status ends more leases than an admission does, since no job waits for it.
STATUS_SWEEP_MAX = 10_000
# Calls in one round trip: Redis serves nobody else meanwhile.
TRIP_CALLS_MAX = 100

Argument = str | bytes | int


class LedgerUnavailable(SwitchyardError):
    """The ledger gave no answer in time."""


class LedgerUnreachable(LedgerUnavailable):
    """Nothing listens where the ledger was: the call did not happen, and a Redis started anew is closed."""


def library() -> str:
    """The source of the function library `switchyard`."""
    return "\n".join((Path(__file__).parent / f"{name}.lua").read_text() for name in FILES)


async def load(redis: Redis) -> None:
    """Put this version of the library in place of any other. Needs the operator's credential."""
    try:
        await redis.function_load(library(), replace=True)
    except RedisError as error:
        raise LedgerUnavailable(f"the ledger's functions could not be loaded: {error}") from error


async def call(redis: Redis, function: str, member: str, *arguments: Argument, refusal: str = "") -> list[Any]:
    """One round trip. `Any` because an answer is what Redis makes of a Lua table: texts and lists of texts.

    A server without the library was started anew: it is closed. Raises LedgerUnavailable.
    """
    return await Calls(redis).call(function, member, *arguments, refusal=refusal)


class Calls:
    """Calls that are made at the same moment travel together, over one connection; each is answered by itself.

    A caller that is cancelled leaves its call to the others: no connection is left between a question and its answer.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: list[tuple[list[Argument], asyncio.Future[Any]]] = []
        self._trips: set[asyncio.Task[None]] = set()

    async def call(self, function: str, member: str, *arguments: Argument, refusal: str = "") -> list[Any]:
        """As the function `call`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((_words(function, member, arguments, refusal), answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._depart)
        return _understood(function, member, await answer)

    def _depart(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), TRIP_CALLS_MAX):
            trip = asyncio.create_task(self._travel(waiting[first : first + TRIP_CALLS_MAX]))
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)

    async def _travel(self, calls: list[tuple[list[Argument], asyncio.Future[Any]]]) -> None:
        answers: list[Any] = [RedisError("the call was given up")] * len(calls)
        try:
            answers = await self._answers([words for words, _ in calls])
        except RedisError as error:
            answers = [error] * len(calls)
        finally:
            for (_, answer), given in zip(calls, answers, strict=True):
                if not answer.done():
                    answer.set_result(given)

    async def _answers(self, calls: list[list[Argument]]) -> list[Any]:
        if len(calls) == 1:
            # A pipeline costs a client half as much again as the call.
            return [await self._redis.execute_command("FCALL", *calls[0])]  # type: ignore[no-untyped-call]
        pipeline = self._redis.pipeline(transaction=False)
        for words in calls:
            pipeline.execute_command("FCALL", *words)
        return await pipeline.execute(raise_on_error=False)


def _words(function: str, member: str, arguments: Sequence[Argument], refusal: str) -> list[Argument]:
    names = [*keys.BOOKS, keys.job_key(member), *([refusal] if refusal else [])]
    return [f"switchyard_{function}", len(names), *names, member, *arguments]


def _understood(function: str, member: str, answer: Any) -> list[Any]:
    if isinstance(answer, ResponseError):
        if "Function not found" in str(answer):
            return [b"closed", member.encode()]
        raise LedgerUnavailable(f"the ledger refused {function}: {answer}") from answer
    if isinstance(answer, RedisError):
        # redis-py raises its own error in the handler of the socket's, without naming it as the cause.
        kind = LedgerUnreachable if isinstance(answer.__context__, ConnectionRefusedError) else LedgerUnavailable
        raise kind(f"the ledger did not answer {function}: {answer}") from answer
    # A reply left behind by a cancelled call must never be taken for the answer to another's question.
    if answer[1] != member.encode():
        raise LedgerUnavailable(f"the ledger answered another question than {function}")
    return list(answer)


def row_arguments(member: str, row: Row) -> list[str | int]:
    """A row as the functions `adopt` and `restore` take it: one argument for all of its fields."""
    return [member, row.forget_ms, json.dumps(row.stored())]
