"""What a worker refuses: every way a route can be forged, altered, re-keyed or outlived."""

import pytest

from consumers.worker.verify import RouteProblem, Standing, route_problem, standing
from infra.keys import make_key
from ledger.registry import Registry
from schemas.adapters import AdapterRevoked
from schemas.digest import digest_of
from schemas.jobs import Limits, Outcome, RequestRouted
from schemas.keys import KeyRevoked, KeyRole
from schemas.record import Coordinates
from schemas.signing import SigningKey
from schemas.tenants import TenantState
from schemas.topics import ADAPTERS, KEYS, TENANTS
from tests.factories import KEYS_OF_ROLE, configured, make_base, make_job, make_registry, make_world
from tests.routes import changed, make_route, signed

NOW_MS = 1_000


@pytest.fixture
def registry() -> Registry:
    return make_registry(make_world())


def problem(request: RequestRouted, registry: Registry, key: str | None = None, partition: int | None = None) -> object:
    at = Coordinates(
        topic="requests.main",
        partition=request.route.partition if partition is None else partition,
        offset=7,
    )
    return route_problem(request, (key or request.route.identity.adapter).encode(), at, "main", registry)


def test_an_authentic_route_passes(registry: Registry) -> None:
    assert problem(make_route(registry), registry) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"job_id": "another"},
        {"alias": "other"},
        {"expires_at_ms": 1},
        {"ledger_epoch": 9},
        {"limits": Limits(tokens_max=9999, context_max=512)},
        {"decided_on": {"adapters": 0}},
        {"ingress": Coordinates(topic="jobs.globex", partition=0, offset=0)},
    ],
)
def test_a_route_changed_after_signing_is_refused(registry: Registry, fields: dict[str, object]) -> None:
    assert problem(changed(make_route(registry), fields), registry) is RouteProblem.SIGNATURE


def test_a_route_signed_by_a_stranger_or_in_another_role_is_refused(registry: Registry) -> None:
    stranger = SigningKey.generate("route-1", KeyRole.ROUTE)
    assert problem(make_route(registry, key=stranger), registry) is RouteProblem.SIGNATURE
    assert problem(make_route(registry, key=KEYS_OF_ROLE[KeyRole.GATE]), registry) is RouteProblem.SIGNATURE


def test_a_route_of_a_revoked_key_is_refused(registry: Registry) -> None:
    request = make_route(registry)
    registry.apply(KEYS.name, 99, KeyRevoked(key_id=request.route.key_id, reason="leaked").encode())
    assert problem(request, registry) is RouteProblem.SIGNATURE


def test_a_revoked_key_that_is_published_again_is_still_refused(registry: Registry) -> None:
    request = make_route(registry)
    published = registry.published[request.route.key_id]
    registry.apply(KEYS.name, 99, KeyRevoked(key_id=request.route.key_id, reason="leaked").encode())
    registry.apply(KEYS.name, 100, published.encode())
    assert problem(request, registry) is RouteProblem.SIGNATURE


def test_a_route_of_the_former_key_runs_until_that_key_is_revoked(registry: Registry) -> None:
    request, (key, published) = make_route(registry), make_key(KeyRole.ROUTE, 2)
    registry.apply(KEYS.name, 99, published.encode())
    assert problem(request, registry) is None
    assert problem(make_route(registry, key=key), registry) is None
    registry.apply(KEYS.name, 100, KeyRevoked(key_id=request.route.key_id, reason="leaked").encode())
    assert problem(request, registry) is RouteProblem.SIGNATURE
    assert problem(make_route(registry, key=key), registry) is None


def test_a_record_under_another_digests_key_is_refused(registry: Registry) -> None:
    assert problem(make_route(registry), registry, key=digest_of(b"other")) is RouteProblem.KEY


def test_a_record_on_another_partition_or_pool_is_refused(registry: Registry) -> None:
    request = make_route(registry)
    assert problem(request, registry, partition=request.route.partition + 1) is RouteProblem.PARTITION
    assert problem(make_route(registry, pool="other"), registry) is RouteProblem.PARTITION


def test_a_route_around_another_body_is_refused(registry: Registry) -> None:
    request = make_route(registry)
    other = make_job(job_id=request.job.job_id, prompt="Something else.")
    assert problem(request.model_copy(update={"job": other}), registry) is RouteProblem.BODY


@pytest.mark.parametrize("mangled", ["", "a..b", "x" * 90, "eyJhbGciOiJub25lIn0.." + "A" * 86])
def test_a_mangled_signature_is_refused(registry: Registry, mangled: str) -> None:
    request = make_route(registry).model_copy(update={"signature": mangled})
    assert problem(request, registry) is RouteProblem.SIGNATURE


def test_a_route_stands_while_nothing_changed(registry: Registry) -> None:
    route = make_route(registry).route
    assert standing(route, registry, route.identity.base, NOW_MS) is None


def test_a_base_model_job_stands_under_the_zero_adapter(registry: Registry) -> None:
    route = make_route(registry, make_job(alias="base")).route
    assert standing(route, registry, route.identity.base, NOW_MS) is None


def test_a_job_past_its_deadline_is_expired(registry: Registry) -> None:
    route = make_route(registry, expires_at_ms=NOW_MS).route
    assert standing(route, registry, route.identity.base, NOW_MS) is Standing.EXPIRED


def test_a_job_for_another_base_is_not_run(registry: Registry) -> None:
    route = make_route(registry).route
    assert standing(route, registry, make_base("another").base, NOW_MS) is Standing.OTHER_BASE


def test_a_job_whose_adapter_was_revoked_since_is_revoked(registry: Registry) -> None:
    route = make_route(registry).route
    revoked = AdapterRevoked(adapter=route.identity.adapter, reason="test", revoked_by="test")
    registry.apply(ADAPTERS.name, 99, revoked.encode())
    assert standing(route, registry, route.identity.base, NOW_MS) is Standing.REVOKED


def test_a_job_that_waits_when_its_routes_key_is_revoked_does_not_start(registry: Registry) -> None:
    route = make_route(registry).route
    registry.apply(KEYS.name, 99, KeyRevoked(key_id=route.key_id, reason="leaked").encode())
    found = standing(route, registry, route.identity.base, NOW_MS)
    assert found is Standing.KEY_REVOKED
    assert found.outcome is Outcome.REVOKED


def test_jobs_of_a_removed_tenant_are_revoked(registry: Registry) -> None:
    route = make_route(registry).route
    _, _, removed = configured("acme", state=TenantState.REMOVED)
    registry.apply(TENANTS.name, 99, removed.encode())
    assert standing(route, registry, route.identity.base, NOW_MS) is Standing.TENANT_REMOVED


def test_a_tenants_job_never_runs_under_another_tenants_adapter(registry: Registry) -> None:
    """Even if a router signed it: the worker checks the owner again."""
    theirs = make_route(registry, tenant="globex")
    forged = theirs.route.identity.model_copy(update={"tenant": "acme"})
    request = signed(theirs.route.model_copy(update={"identity": forged}), theirs.job)
    assert problem(request, registry) is None
    assert standing(request.route, registry, forged.base, NOW_MS) is Standing.NOT_ADMISSIBLE
