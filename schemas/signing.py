"""Ed25519 signatures as detached JWS (RFC 7515 appendix F, RFC 8037), one exact profile.

The protected header is exactly `{"alg":"Ed25519","kid":…,"typ":…}` in canonical bytes, so a token with any other
header (another algorithm, `crit`, `jwk`, duplicate or reordered members) fails before a key is looked at.
"""

import base64
import re
from collections.abc import Mapping
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from schemas.digest import canonical
from schemas.errors import BadSignature
from schemas.keys import KeyRole

ALGORITHM = "Ed25519"
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,512}\.\.[A-Za-z0-9_-]{86}")


class Signed(Protocol):
    """A value with the bytes that are signed."""

    def signed_bytes(self) -> bytes: ...


class SigningKey:
    """A private key, its id and its role."""

    def __init__(self, key_id: str, role: KeyRole, key: OKPKey) -> None:
        private = key.private_key
        if not isinstance(private, Ed25519PrivateKey):
            raise BadSignature(f"{key_id} is not an Ed25519 private key")
        self.key_id = key_id
        self.role = role
        self._key = key
        self._private = private
        self._head = _encode(canonical({"alg": ALGORITHM, "kid": key_id, "typ": _typ(role)}))

    @classmethod
    def from_pem(cls, key_id: str, role: KeyRole, pem: bytes) -> "SigningKey":
        return cls(key_id, role, OKPKey.import_key(pem))

    @classmethod
    def generate(cls, key_id: str, role: KeyRole) -> "SigningKey":
        return cls(key_id, role, OKPKey.generate_key("Ed25519"))

    def to_pem(self) -> bytes:
        return self._key.as_pem(private=True)

    @property
    def public_key(self) -> str:
        return str(self._key.as_dict(private=False)["x"])

    def sign(self, value: Signed) -> str:
        """A detached token `header..signature` over the value's signed bytes."""
        return self.sign_bytes(value.signed_bytes())

    def sign_bytes(self, content: bytes) -> str:
        """As `sign`, where the bytes are at hand. The compact form has nothing to negotiate, so it is written here."""
        signature = self._private.sign(f"{self._head}.{_encode(content)}".encode())
        return f"{self._head}..{_encode(signature)}"


def verify(value: Signed, token: str, key_id: str, role: KeyRole, keys: Mapping[str, str]) -> None:
    """Check a detached token. `keys` maps the ids of this role's unrevoked keys to public keys.

    Raises BadSignature: other form, other header, unknown key, or bytes that were not signed.
    """
    if not TOKEN_PATTERN.fullmatch(token):
        raise BadSignature("the signature is not a detached JWS")
    head, _, signature = token.split(".")
    if head != _encode(canonical({"alg": ALGORITHM, "kid": key_id, "typ": _typ(role)})):
        raise BadSignature("the signature's header is not the one of this profile and key")
    public = keys.get(key_id)
    if public is None:
        raise BadSignature("the signature's key is unknown, revoked or of another role")
    key = OKPKey.import_key({"kty": "OKP", "crv": "Ed25519", "x": public})
    try:
        jws.deserialize_compact(f"{head}.{_encode(value.signed_bytes())}.{signature}", key, algorithms=[ALGORITHM])
    except (JoseError, ValueError) as error:
        raise BadSignature("the signature does not match") from error


def _typ(role: KeyRole) -> str:
    return f"switchyard-{role.value}+jws"


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
