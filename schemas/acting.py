"""Whether a grant lets somebody act in a tenant's name now. Denies by default."""

from collections.abc import Mapping

from schemas.errors import BadSignature
from schemas.ids import TenantId
from schemas.impersonation import IMPERSONATION_MS_MAX, SignedImpersonation
from schemas.keys import KeyRole
from schemas.signing import verify

# The operator's clock may be ahead of the broker's by this much.
CLOCK_AHEAD_MS_MAX = 60 * 1000


def acting_problem(
    grant: SignedImpersonation, tenant: TenantId, at_ms: int, admin_keys: Mapping[str, str]
) -> str | None:
    """Why this grant does not let anybody act for this tenant at this time, or None.

    `admin_keys` are the unrevoked ones of role `admin`, by id. The words say nothing but what the grant says itself.
    """
    claimed = grant.impersonation
    if claimed.tenant != tenant:
        return "the grant is for another tenant"
    if claimed.expires_at_ms - claimed.granted_at_ms > IMPERSONATION_MS_MAX:
        return f"the grant lasts longer than {IMPERSONATION_MS_MAX // 60_000} minutes"
    # One that is made out for next year must not be good until then.
    if at_ms < claimed.granted_at_ms - CLOCK_AHEAD_MS_MAX:
        return "the grant is not in force yet"
    if at_ms >= claimed.expires_at_ms:
        return "the grant has expired"
    try:
        verify(claimed, grant.signature, claimed.key_id, KeyRole.ADMIN, admin_keys)
    except BadSignature:
        return "the grant is not signed by an admin key that is published and not revoked"
    return None
