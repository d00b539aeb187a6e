"""Entries for a scheduler, and what a worker's loop does with its plans."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from consumers.worker.plan import Entry
from consumers.worker.scheduler import Scheduler
from schemas.record import Coordinates
from tests.factories import make_job, make_registry, make_world
from tests.routes import make_route

DIGESTS = [f"sha256:{number:064x}" for number in range(10)]
REGISTRY = make_registry(make_world())
_numbers: Iterator[int] = count()


def entry(digest: str, queued_at: float = 0.0, alone: bool = False) -> Entry:
    request = make_route(REGISTRY, make_job())
    identity = request.route.identity.model_copy(update={"adapter": digest})
    return Entry(
        request=Coordinates(topic="requests.main", partition=0, offset=next(_numbers)),
        route=request.route.model_copy(update={"identity": identity}),
        job=request.job,
        queued_at=queued_at,
        expires_at=1000.0,
        alone=alone,
    )


def start(scheduler: Scheduler, now: float, resident: set[str]) -> list[Entry]:
    """Follow a plan as the loop does, with loads that succeed at once."""
    started: list[Entry] = []
    for _ in range(20):
        plan = scheduler.plan(now, resident)
        for item in plan.start:
            scheduler.withdraw([item.entry])
            scheduler.started(item.entry)
            started.append(item.entry)
        if plan.load is None:
            break
        if len(resident) >= scheduler.open_max:
            free = resident - scheduler.wanted()
            assert free, "a digest that is open has a slot to take"
            resident.discard(min(free))
        resident.add(plan.load)
    assert scheduler.running or not scheduler.queued_count, "work waits while nothing runs"
    return started


def of_tenant(tenant: str, digest: str, queued_at: float = 0.0, tokens: int = 16, **fields: Any) -> Entry:
    held = entry(digest, queued_at)
    identity = held.route.identity.model_copy(update={"tenant": tenant})
    limits = held.route.limits.model_copy(update={"tokens_max": tokens})
    route = held.route.model_copy(update={"identity": identity, "limits": limits})
    return replace(held, route=route, owner=tenant, **fields)
