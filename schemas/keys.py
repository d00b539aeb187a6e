"""Public keys of those who sign: routers, the registry, the gate."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas.ids import KeyId
from schemas.record import Record


class KeyRole(StrEnum):
    """What a key may sign."""

    ROUTE = "route"
    REGISTRY = "registry"
    GATE = "gate"
    # Permissions to act in a tenant's name.
    ADMIN = "admin"


class KeyPublished(Record):
    """An Ed25519 public key (RFC 8037 `x`, base64url) that signs in one role from here on."""

    type: Literal["KeyPublished"] = "KeyPublished"
    version: Literal[1] = 1
    key_id: KeyId
    role: KeyRole
    public_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]


class KeyRevoked(Record):
    """Nothing signed with this key is believed any more."""

    type: Literal["KeyRevoked"] = "KeyRevoked"
    version: Literal[1] = 1
    key_id: KeyId
    reason: str
