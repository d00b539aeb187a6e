"""Loading the function library, and calling one function of it."""

from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from ledger import keys
from ledger.rows import Row
from schemas.errors import SwitchyardError

LIBRARY = Path(__file__).parent / "switchyard.lua"
# A status ends more leases than an admission does, since no job waits for it.
STATUS_SWEEP_MAX = 10_000


class LedgerUnavailable(SwitchyardError):
    """The ledger gave no answer in time."""


class LedgerUnreachable(LedgerUnavailable):
    """Nothing listens where the ledger was: the call did not happen, and a Redis started anew is closed."""


async def load(redis: Redis) -> None:
    """Put this version of the library in place of any other. Needs the operator's credential."""
    try:
        await redis.function_load(LIBRARY.read_text(), replace=True)
    except RedisError as error:
        raise LedgerUnavailable(f"the ledger's functions could not be loaded: {error}") from error


async def call(redis: Redis, function: str, member: str, *arguments: str | bytes | int, refusal: str = "") -> list[Any]:
    """One round trip. `Any` because an answer is what Redis makes of a Lua table: texts and lists of texts.

    A server without the library was started anew: it is closed. Raises LedgerUnavailable.
    """
    names = [*keys.BOOKS, keys.job_key(member), *([refusal] if refusal else [])]
    try:
        answer = await redis.fcall(f"switchyard_{function}", len(names), *names, member, *arguments)
    except ResponseError as error:
        if "Function not found" in str(error):
            return [b"closed", member.encode()]
        raise LedgerUnavailable(f"the ledger refused {function}: {error}") from error
    except RedisError as error:
        # redis-py raises its own error in the handler of the socket's, without naming it as the cause.
        kind = LedgerUnreachable if isinstance(error.__context__, ConnectionRefusedError) else LedgerUnavailable
        raise kind(f"the ledger did not answer {function}: {error}") from error
    # A reply left behind by a cancelled call must never be taken for the answer to another's question.
    if answer[1] != member.encode():
        raise LedgerUnavailable(f"the ledger answered another question than {function}")
    return list(answer)


def row_arguments(member: str, row: Row) -> list[str | int]:
    """A row as the functions `adopt` and `restore` take it."""
    stored = row.stored()
    pairs = [text for pair in stored.items() for text in pair]
    return [member, row.forget_ms, len(stored), *pairs]
