"""Admissions a second, beside bare calls of a function that does nothing, over as many connections.

The peer is redis-py's own `fcall`, as anyone would make that call. The bare call is also made the way that the ledger's
calls go: what is between that and an admission is the ledger's work, on both sides.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from statistics import median

from infra.launch.stack import Stack
from infra.redis import Client, connect
from ledger.answers import Admission, Granted
from ledger.store import Ledger
from schemas.jobs import JobClass
from tests.bench.bare import FUNCTION, LIBRARY
from tests.bench.children import BenchFailed, Say
from tests.bench.figures import Figure
from tests.fakes_ledger import make_admission, make_decision

CONNECTIONS = 32
# Ended between rounds, so that none finds a place taken.
PLENTY = 1_000_000
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How many calls a round makes, and how many rounds there are."""

    calls: int
    rounds: int


async def measure(stack: Stack, effort: Calls, say: Say) -> list[Figure]:
    admin = connect(stack.redis("admin"))
    await admin.function_load(LIBRARY, replace=True)
    ours: list[float] = []
    theirs: list[float] = []
    same_way: list[float] = []
    ledgers = [Ledger(_alone(stack)) for _ in range(CONNECTIONS)]
    bare = [_alone(stack) for _ in range(CONNECTIONS)]
    try:
        for number in range(effort.rounds):
            asks = iter(await _asks(admin, effort.calls))
            ours.append(await _rate(effort.calls, lambda place: _admit(ledgers[place], next(asks))))  # noqa: B023
            theirs.append(await _rate(effort.calls, lambda place: bare[place].fcall(FUNCTION, 0)))
            same_way.append(await _rate(effort.calls, lambda place: bare[place].lane.call("FCALL", FUNCTION, 0)))
            say(
                f"ledger: {ours[-1]:.0f} admissions/s, {theirs[-1]:.0f} bare calls/s, {same_way[-1]:.0f} bare calls/s "
                f"the ledger's way ({number + 1} of {effort.rounds})"
            )
    finally:
        for client in (admin, *bare, *(ledger._redis for ledger in ledgers)):
            await client.aclose()
    rate, peer = median(ours), median(theirs)
    return [
        Figure(name="ledger_ratio", value=rate / peer, unit="ratio", peer=1.0),
        Figure(name="ledger_admissions_per_s", value=rate, unit="calls/s", peer=peer),
        Figure(name="ledger_same_way_ratio", value=rate / median(same_way), unit="ratio", peer=1.0),
    ]


def _alone(stack: Stack) -> Client:
    """A client whose calls share one connection with nobody's."""
    return connect(stack.redis("admin"))


async def _asks(admin: Client, calls: int) -> list[Admission]:
    """Of many tenants, as it is where this figure matters."""
    seconds, _ = await admin.time()
    decisions = [
        make_decision(f"tenant-{n}", job_class=JobClass.BATCH, expires_at_ms=int(seconds) * 1000 + 600_000)
        for n in range(20)
    ]
    return [
        make_admission(
            f"job-{next(_numbers)}",
            decisions[n % 20],
            concurrency_max=PLENTY,
            window_max=PLENTY,
            adapter_concurrency_max=PLENTY,
        )
        for n in range(calls)
    ]


async def _admit(ledger: Ledger, ask: Admission) -> None:
    answer = await ledger.admit(ask)
    if not isinstance(answer, Granted):
        raise BenchFailed(f"an admission was not granted: {answer}")


async def _rate(calls: int, call: Callable[[int], Awaitable[object]]) -> float:
    """Calls a second, one at a time on every connection."""
    loop = asyncio.get_running_loop()
    left = iter(range(calls))

    async def work(place: int) -> None:
        for _ in left:
            await call(place)

    began = loop.time()
    await asyncio.gather(*(work(place) for place in range(CONNECTIONS)))
    return calls / (loop.time() - began)
