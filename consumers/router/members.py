"""Which workers are there: a worker counts while Kafka says that it is a member of its pool's consumer group.

What a worker announced stands in the log until somebody takes it back, and a killed worker takes nothing back. Its
membership ends by itself.
"""

import asyncio
from dataclasses import dataclass

from infra.clock import Clock
from infra.kafka.clients import KafkaError, KafkaTimeout
from infra.kafka.members import GroupMembers
from infra.kafka.tail import Tail
from infra.logs import ActionLog
from ledger.registry import Registry
from schemas.adapters import WorkerReady
from schemas.topics import WORKERS, requests_group

log = ActionLog("router")

# How often Kafka is asked, beside once for each new word of a worker.
ASK_S = 1.0
# For how long an answer counts, from when it was asked for: as long as a registry view.
ANSWER_COUNTS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _Answer:
    names: frozenset[str]
    asked_at: float


class Members:
    """The last answer for each pool. One that is too old, or was never given, names nobody."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    def heard(self, pool: str, names: frozenset[str], asked_at: float) -> None:
        self._answers[pool] = _Answer(names=names, asked_at=asked_at)

    def present(self, worker: WorkerReady) -> bool:
        answer = self._answers.get(worker.pool)
        if answer is None or worker.worker not in answer.names:
            return False
        return self._clock.monotonic() - answer.asked_at <= ANSWER_COUNTS_S

    def last(self, pool: str) -> frozenset[str] | None:
        answer = self._answers.get(pool)
        return answer.names if answer is not None else None


class Watch:
    """Asks Kafka beside the router's turns. A failed question changes nothing: the answer before it grows old."""

    def __init__(self, groups: GroupMembers, members: Members, view: Tail, registry: Registry, clock: Clock) -> None:
        self._groups = groups
        self._members = members
        self._view = view
        self._registry = registry
        self._clock = clock
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            heard = self._said()
            pools = {worker.pool for worker in self._registry.workers.values() if worker.partitions}
            await asyncio.gather(*[self._ask(pool) for pool in pools])
            # A worker speaks when partitions are its own, so it is a member by then.
            await self._view.wait_until(lambda: self._said() != heard, ASK_S)  # noqa: B023 - called before the next

    def _said(self) -> int:
        return self._registry.positions.get(WORKERS.name, 0)

    async def _ask(self, pool: str) -> None:
        asked_at = self._clock.monotonic()
        try:
            names = await self._groups.of(requests_group(pool))
        except (KafkaError, KafkaTimeout, OSError) as error:
            if self._problems.get(pool) != str(error):
                log.warning("members.unknown", pool=pool, problem=str(error))
            self._problems[pool] = str(error)
            return
        self._problems.pop(pool, None)
        if names != self._members.last(pool):
            log.info("members.changed", pool=pool, members=sorted(names))
        self._members.heard(pool, names, asked_at)
