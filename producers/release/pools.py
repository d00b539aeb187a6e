"""What stands of the pools, as routers see it: a worker counts while Kafka says that it is in its pool's group."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from infra.kafka.clients import KafkaError, KafkaTimeout, KafkaUnreachable
from infra.kafka.members import GroupMembers
from infra.settings import KafkaSettings
from ledger.registry import Registry
from schemas.adapters import WorkerReady
from schemas.topics import requests_group


class Standing(StrEnum):
    """Whether a worker that announced itself counts, or why it does not."""

    READY = "ready"
    ABSENT = "not in the group"
    UNKNOWN = "membership unknown"
    UNSUITED = "not what the pool is configured for"
    WITHOUT_PARTITIONS = "no partition is its own"
    # As its memory allows: see `switchyard worker memory`.
    WITHOUT_ROWS = "takes no rows now"


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """A worker that announced itself, the partitions that nobody took over from it, and whether it counts."""

    ready: WorkerReady
    partitions: tuple[int, ...]
    standing: Standing


@dataclass(frozen=True, kw_only=True)
class PoolNow:
    """A pool's workers, and the rows and places of those that count; `problem` says why these are not known."""

    workers: tuple[WorkerNow, ...]
    rows: int
    window: int
    problem: str | None


async def members_of(kafka: KafkaSettings, pools: Iterable[str]) -> dict[str, frozenset[str] | str]:
    """Who is in each pool's group by client id, or a sentence about why that is not known."""
    names = sorted(pools)
    groups = GroupMembers(kafka)
    try:
        await groups.start()
        return dict(zip(names, await asyncio.gather(*[_members(groups, name) for name in names]), strict=True))
    except (KafkaError, KafkaTimeout, KafkaUnreachable, OSError) as error:
        return dict.fromkeys(names, str(error))
    finally:
        await groups.stop()


async def _members(groups: GroupMembers, pool: str) -> frozenset[str] | str:
    try:
        return await groups.of(requests_group(pool))
    except (KafkaError, KafkaTimeout, OSError) as error:
        return str(error)


def pool_now(registry: Registry, pool: str, members: frozenset[str] | str) -> PoolNow:
    """A pool as a router sees it that was told the same. Pure."""
    known = members if isinstance(members, frozenset) else None

    def present(worker: WorkerReady) -> bool:
        return known is not None and worker.worker in known

    workers = tuple(
        _worker_now(registry, worker, known) for _, worker in sorted(registry.workers.items()) if worker.pool == pool
    )
    partitions = range(registry.pools[pool].partitions)
    return PoolNow(
        workers=workers,
        rows=sum(worker.ready.rows for worker in workers if worker.standing is Standing.READY),
        window=sum(registry.window_of(pool, partition, present) for partition in partitions),
        problem=members if isinstance(members, str) else None,
    )


def _worker_now(registry: Registry, worker: WorkerReady, known: frozenset[str] | None) -> WorkerNow:
    own = tuple(p for p in worker.partitions if registry.owners.get((worker.pool, p)) == worker.worker)
    return WorkerNow(ready=worker, partitions=own, standing=_standing(registry, worker, own, known))


def _standing(registry: Registry, worker: WorkerReady, own: tuple[int, ...], known: frozenset[str] | None) -> Standing:
    if known is not None and worker.worker not in known:
        return Standing.ABSENT
    if not own:
        return Standing.WITHOUT_PARTITIONS
    if registry.owner_of(worker.pool, own[0]) is None:
        return Standing.UNSUITED
    if not worker.rows:
        return Standing.WITHOUT_ROWS
    return Standing.READY if known is not None else Standing.UNKNOWN
