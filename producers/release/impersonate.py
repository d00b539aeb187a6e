"""A grant to act in a tenant's name, signed by the operator and told to the audit before anybody has it."""

import secrets

from pydantic import ValidationError

from infra.kafka.clients import KafkaError, KafkaTimeout
from infra.keys import load_key
from producers.release.desk import Desk
from producers.release.platform import KeyNotBelieved
from schemas.audit import ImpersonationGranted, undigested
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.impersonation import Impersonation, SignedImpersonation
from schemas.keys import KeyRole
from schemas.record import describe


class NotAudited(SwitchyardError):
    """The audit did not take the record of the grant."""


async def impersonate(desk: Desk, tenant: str, reason: str, now_ms: int, lasts_ms: int) -> SignedImpersonation:
    """A grant that the audit knows of. Raises KeyMissing, KeyNotBelieved, Unknown, InvalidRecord, NotAudited."""
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
    grant = SignedImpersonation(impersonation=impersonation, signature=key.sign(impersonation))
    try:
        await desk.record(undigested(impersonation.tenant), ImpersonationGranted(impersonation=impersonation))
    except (KafkaError, KafkaTimeout) as error:
        # The record may arrive yet: a grant that nobody has is one that nobody uses.
        raise NotAudited(f"no grant was made: the audit did not take its record: {error}") from error
    return grant
