"""Loading the function library, and calling one function of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from infra.redis import Client
from ledger import keys
from ledger.rows import Row
from schemas.errors import SwitchyardError

# One library: the files in this order.
FILES = ("checks", "spending", "places", "leases", "runs", "books")
# A status ends more leases than an admission does, since no job waits for it.
STATUS_SWEEP_MAX = 10_000

Argument = str | bytes | int


class LedgerUnavailable(SwitchyardError):
    """The ledger gave no answer in time."""


class LedgerUnreachable(LedgerUnavailable):
    """Nothing listens where the ledger was: the call did not happen, and a Redis started anew is closed."""


def library() -> str:
    """The source of the function library `switchyard`."""
    return "\n".join((Path(__file__).parent / f"{name}.lua").read_text() for name in FILES)


async def load(redis: Client) -> None:
    """Put this version of the library in place of any other. Needs the operator's credential."""
    try:
        await redis.function_load(library(), replace=True)
    except RedisError as error:
        raise LedgerUnavailable(f"the ledger's functions could not be loaded: {error}") from error


async def call(redis: Client, function: str, member: str, *arguments: Argument, refusal: str = "") -> list[Any]:
    """One round trip. `Any` because an answer is what Redis makes of a Lua table: texts and lists of texts.

    A server without the library was started anew: it is closed. Raises LedgerUnavailable.
    """
    answer = await redis.lane.call("FCALL", *_words(function, member, arguments, refusal))
    return _understood(function, member, answer)


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
