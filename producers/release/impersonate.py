"""A grant to act in a tenant's name, made out and signed by the operator."""

import secrets

from pydantic import ValidationError

from infra.keys import load_key
from producers.release.desk import Desk
from producers.release.platform import KeyNotBelieved
from schemas.errors import InvalidRecord
from schemas.impersonation import Impersonation, SignedImpersonation
from schemas.keys import KeyRole
from schemas.record import describe


async def impersonate(desk: Desk, tenant: str, reason: str, now_ms: int, lasts_ms: int) -> SignedImpersonation:
    """Raises KeyMissing, KeyNotBelieved, Unknown, InvalidRecord."""
    key = load_key(desk.keys, KeyRole.ADMIN)
    if desk.registry.keys(KeyRole.ADMIN).get(key.key_id) != key.public_key:
        raise KeyNotBelieved(f"the registry does not believe {key.key_id}; was it revoked?")
    try:
        impersonation = Impersonation(
            grant_id=secrets.token_hex(8),
            tenant=desk.tenant(tenant).tenant,
            admin=desk.actor,
            reason=reason.strip(),
            granted_at_ms=now_ms,
            expires_at_ms=now_ms + lasts_ms,
            key_id=key.key_id,
        )
    except ValidationError as error:
        raise InvalidRecord(describe(error)) from error
    return SignedImpersonation(impersonation=impersonation, signature=key.sign(impersonation))
