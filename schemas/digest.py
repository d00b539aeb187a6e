"""Canonical bytes (RFC 8785) and the digests taken over them."""

import hashlib
from typing import Any

import rfc8785

# Bytes in a model file can be gigabytes; a record never is.
CHUNK_BYTES = 1 << 20


def canonical(value: Any) -> bytes:
    """The one byte form of a JSON value (RFC 8785): what digests and signatures are taken over.

    `Any` because JSON is: a mapping, a list, text, an integer below 2^53, a finite float, a boolean or null.
    """
    return rfc8785.dumps(value)


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
