"""Private keys: a file each, readable by its owner alone."""

from infra.files import write_private
from infra.settings import KeySettings
from schemas.errors import SwitchyardError
from schemas.keys import KeyPublished, KeyRole
from schemas.signing import SigningKey


class KeyMissing(SwitchyardError):
    """This process has no private key for what it should sign."""


def make_key(role: KeyRole, number: int) -> tuple[SigningKey, KeyPublished]:
    """A new key and the record of its public half.

    Publish it, then `keep_key`: one that was published and lost signs nothing, one that was never published is not
    believed.
    """
    key = SigningKey.generate(f"{role.value}-{number}", role)
    return key, KeyPublished(key_id=key.key_id, role=role, public_key=key.public_key)


def keep_key(settings: KeySettings, key: SigningKey) -> None:
    write_private(settings.directory / f"{key.key_id}.pem", key.to_pem())


def load_key(settings: KeySettings, role: KeyRole) -> SigningKey:
    """A role's private key. Raises KeyMissing, also where others may read the file."""
    path = settings.path(role)
    try:
        if path.stat().st_mode & 0o077:
            raise KeyMissing(f"{path} can be read by others; make it private with: chmod 600 {path}")
        pem = path.read_bytes()
    except OSError as error:
        raise KeyMissing(f"{path} cannot be read; make the keys with: switchyard key init") from error
    try:
        return SigningKey.from_pem(settings.key_id(role), role, pem)
    except ValueError as error:
        raise KeyMissing(f"{path} holds no Ed25519 private key") from error
