"""The names of things, each with one strict grammar, parsed once at the edge."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.errors import InvalidName

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
TENANT_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
ALIAS_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"

Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
TenantId = Annotated[str, StringConstraints(pattern=TENANT_PATTERN)]
Alias = Annotated[str, StringConstraints(pattern=ALIAS_PATTERN)]
JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
PoolId = Annotated[str, StringConstraints(pattern=TENANT_PATTERN)]
KeyId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]


def is_digest(text: str) -> bool:
    return re.fullmatch(DIGEST_PATTERN, text) is not None and text.isascii()


def is_alias(text: str) -> bool:
    return re.fullmatch(ALIAS_PATTERN, text) is not None and not text.endswith("\n")


def is_tenant(text: str) -> bool:
    return re.fullmatch(TENANT_PATTERN, text) is not None and not text.endswith("\n")


def parse_tenant(text: str) -> str:
    if not is_tenant(text):
        raise InvalidName(
            "a tenant is 1 to 40 lower-case letters, digits or inner hyphens, "
            f"such as 'acme'; this is not one: {text[:60]!r}"
        )
    return text


def parse_digest(text: str) -> str:
    if not is_digest(text):
        raise InvalidName(f"a digest is 'sha256:' and 64 hex digits; this is not one: {text[:90]!r}")
    return text


def parse_alias(text: str) -> str:
    if not is_alias(text):
        raise InvalidName(
            "an alias is a letter or digit, then letters, digits, '.', '_' or '-', "
            f"at most 128 in all; this is not one: {text[:60]!r}"
        )
    return text
