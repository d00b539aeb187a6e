"""Whether a record is an authentic route of this place, and whether what it routes may still run. Pure."""

from enum import StrEnum

from ledger.registry import Registry
from schemas.errors import BadSignature
from schemas.jobs import Outcome, RequestRouted, Route
from schemas.keys import KeyRole
from schemas.record import Coordinates
from schemas.replies import FailedOutcome
from schemas.signing import verify
from schemas.tenants import TenantState


class RouteProblem(StrEnum):
    """Why a record is a dead letter: it is not a route that a router of ours wrote to this place."""

    SIGNATURE = "signature"
    KEY = "key"
    BODY = "body"
    PARTITION = "partition"


class Standing(StrEnum):
    """Why an authentic route is not executed."""

    EXPIRED = "deadline_passed"
    REVOKED = "adapter_revoked"
    KEY_REVOKED = "route_key_revoked"
    TENANT_REMOVED = "tenant_removed"
    OTHER_BASE = "wrong_base"
    NOT_ADMISSIBLE = "adapter_not_admissible"

    @property
    def outcome(self) -> FailedOutcome:
        if self is Standing.EXPIRED:
            return Outcome.EXPIRED
        if self in (Standing.REVOKED, Standing.KEY_REVOKED, Standing.TENANT_REMOVED):
            return Outcome.REVOKED
        return Outcome.FAILED


def route_problem(
    request: RequestRouted, key: bytes | None, at: Coordinates, pool: str, registry: Registry
) -> RouteProblem | None:
    """Everything that a forged, re-keyed, altered or misrouted record fails. None for an authentic one."""
    route = request.route
    try:
        verify(route, request.signature, route.key_id, KeyRole.ROUTE, registry.keys(KeyRole.ROUTE))
    except BadSignature:
        return RouteProblem.SIGNATURE
    if key != route.identity.adapter.encode():
        return RouteProblem.KEY
    if request.job.body_hash != route.body_hash or request.job.job_id != route.job_id:
        return RouteProblem.BODY
    if route.pool != pool or route.partition != at.partition or at.topic != f"requests.{pool}":
        return RouteProblem.PARTITION
    return None


def standing(route: Route, registry: Registry, base: str, now_ms: int) -> Standing | None:
    """Why an authentic route may not run now, or None. Moved aliases do not touch admitted jobs."""
    if now_ms >= route.expires_at_ms:
        return Standing.EXPIRED
    # It was believed when it came; a key that is revoked while its routes wait starts none of them.
    if route.key_id in registry.revoked_keys:
        return Standing.KEY_REVOKED
    if route.identity.base != base:
        return Standing.OTHER_BASE
    tenant = registry.tenants.get(route.identity.tenant)
    if tenant is None or tenant.state is TenantState.REMOVED:
        return Standing.TENANT_REMOVED
    entry = registry.adapters.get(route.identity.adapter)
    if entry is not None and entry.revoked is not None:
        return Standing.REVOKED
    manifest = entry.manifest if entry is not None else None
    zero = registry.bases[base].zero_adapter if base in registry.bases else None
    owned = manifest is not None and (
        manifest.owner == route.identity.tenant or (manifest.owner is None and manifest.digest == zero)
    )
    if registry.admission_problem(route.identity.adapter) is not None or not owned:
        return Standing.NOT_ADMISSIBLE
    if manifest is None or (manifest.base, manifest.tokenizer) != (base, route.identity.tokenizer):
        return Standing.OTHER_BASE
    return None
