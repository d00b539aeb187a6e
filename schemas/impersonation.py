"""Acting in a tenant's name: a short-lived, signed permission that the job carries and the audit shows."""

from typing import Annotated

from pydantic import Field

from schemas.digest import canonical
from schemas.ids import Count, KeyId, TenantId
from schemas.record import Value

# Nobody acts in another's name for longer than this without asking again.
IMPERSONATION_MS_MAX = 3600 * 1000


class Impersonation(Value):
    """Who acts for which tenant, why, and until when."""

    grant_id: Annotated[str, Field(pattern=r"^[a-z0-9-]{8,64}$")]
    tenant: TenantId
    admin: Annotated[str, Field(min_length=1, max_length=128)]
    reason: Annotated[str, Field(min_length=1, max_length=500)]
    granted_at_ms: Count
    expires_at_ms: Count
    key_id: KeyId

    def signed_bytes(self) -> bytes:
        return canonical(self.model_dump(mode="json"))


class SignedImpersonation(Value):
    """An impersonation as a job carries it: `signature` is a detached JWS over it, by a key of role `admin`."""

    impersonation: Impersonation
    signature: Annotated[str, Field(max_length=1024)]
