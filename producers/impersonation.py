"""Submitting in a tenant's name: the grant is read, and looked at as a router will, before anything is sent."""

from pathlib import Path

from pydantic import ValidationError

from infra.credentials import kafka_as
from infra.kafka.tail import read_range
from infra.settings import KafkaSettings
from ledger.registry import Registry
from schemas.acting import acting_problem
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.impersonation import SignedImpersonation
from schemas.keys import KeyRole
from schemas.record import describe, strict_json
from schemas.topics import KEYS

# Who may write a tenant's topics beside the tenant.
ADMIN = "admin"


class BadGrant(SwitchyardError):
    """The grant cannot be used."""


def load_grant(path: Path) -> SignedImpersonation:
    """A grant as `switchyard tenant impersonate` writes it. Raises BadGrant."""
    try:
        content = path.read_bytes()
        strict_json(content)
        return SignedImpersonation.model_validate_json(content)
    except OSError as error:
        raise BadGrant(f"{path} cannot be read: {error.strerror}") from error
    except InvalidRecord as error:
        raise BadGrant(f"{path} holds no grant: {error}") from error
    except ValidationError as error:
        raise BadGrant(f"{path} holds no grant: {describe(error)}") from error


async def way_in(tenant: str, grant: SignedImpersonation | None, now_ms: int) -> KafkaSettings:
    """How the tenant reaches Kafka, or whoever acts for it with a grant.

    Raises BadGrant where a router would refuse a job that came now with this grant; NoStack, BadSettings.
    """
    if grant is None:
        return kafka_as(tenant)
    settings = kafka_as(ADMIN)
    registry = Registry()
    async for record in read_range(settings, KEYS.name, 0):
        registry.apply(record.topic, record.offset, record.value)
    problem = acting_problem(grant, tenant, now_ms, registry.keys(KeyRole.ADMIN))
    if problem is not None:
        raise BadGrant(f"nothing was sent: {problem}")
    return settings
