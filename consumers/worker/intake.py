"""From a record on `requests.<pool>` to an entry in the queue, or to a dead letter with its reason."""

from dataclasses import dataclass

from consumers.worker.adapters import Adapters
from consumers.worker.doors import Doors
from consumers.worker.plan import Entry, Part
from consumers.worker.verify import RouteProblem, route_problem
from infra.kafka.records import Incoming
from ledger.registry import Registry
from schemas.errors import InvalidRecord
from schemas.jobs import RequestRouted
from schemas.service import Residency

# How long a record whose signature fails is given the benefit of a view that may lag behind a new key.
KEY_LAG_S = 5.0
# One wait for the view; it is waited again, since a record is never judged on an older view than the router's.
VIEW_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Not an authentic route of this place: never executed, never answered."""

    reason: str
    detail: str


class Intake:
    """Verifies records one by one; each waits, where it must, without holding up the others."""

    def __init__(self, doors: Doors, adapters: Adapters) -> None:
        self._doors = doors
        self._adapters = adapters

    async def read(self, record: Incoming) -> Entry | Refused:
        try:
            request = RequestRouted.decode(record.value)
        except InvalidRecord as error:
            return Refused(reason="invalid_record", detail=str(error))
        registry, view = self._doors.registry, self._doors.view
        decided_on = request.route.decided_on
        problem = self._problem(request, record)
        if problem is RouteProblem.SIGNATURE and not registry.passed(decided_on):
            await view.wait_until(lambda: registry.passed(decided_on), KEY_LAG_S)
            problem = self._problem(request, record)
        if problem is not None:
            return Refused(reason=problem.value, detail=f"the route's {problem.value} is not right")
        while not registry.passed(decided_on):
            await view.wait_until(lambda: registry.passed(decided_on), VIEW_WAIT_S)
        clock, digest = self._doors.clock, request.route.identity.adapter
        now = clock.monotonic()
        return Entry(
            request=record.coordinates,
            route=request.route,
            job=request.job,
            queued_at=now,
            expires_at=now + (request.route.expires_at_ms - clock.now_ms()) / 1000,
            owner=self._adapters.owner_of(digest),
            residency=self._residency(digest),
        )

    def _residency(self, digest: str) -> Residency:
        if digest in self._adapters.usable():
            return Residency.SLOT
        return Residency.HOST if digest in self._adapters.in_host() else Residency.COLD

    def _problem(self, request: RequestRouted, record: Incoming) -> RouteProblem | None:
        return route_problem(request, record.key, record.coordinates, self._doors.pool, self._doors.registry)


def parts_of(registry: Registry) -> dict[str, Part]:
    """Every tenant's part in a worker."""
    return {
        name: Part(
            weight=tenant.weight,
            floor=tenant.slots_floor,
            loads_per_minute=tenant.loads_per_minute,
            resident_max=tenant.resident_adapters_max,
        )
        for name, tenant in registry.tenants.items()
    }
