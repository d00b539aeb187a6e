"""Canonical bytes (RFC 8785) and the digests taken over them."""

import hashlib
from typing import Any, Final

import orjson
import rfc8785

# Bytes in a model file can be gigabytes; a record never is.
CHUNK_BYTES = 1 << 20


# Between these orjson writes a fraction as ECMAScript does: the shortest digits, without an exponent.
FRACTION_MIN: Final = 1e-4
INTEGER_MAX: Final = 2**53 - 1

_AS_THEY_ARE: Final = frozenset({str, bool, type(None)})


def canonical(value: Any) -> bytes:
    """The one byte form of a JSON value (RFC 8785): what digests and signatures are taken over.

    `Any` because JSON is: a mapping, a list, text, an integer below 2^53, a finite float, a boolean or null.
    What orjson writes in the same bytes it writes, for every record passes here several times.
    """
    try:
        return orjson.dumps(_plain(value), option=orjson.OPT_SORT_KEYS)
    except (_NotPlain, TypeError):
        return rfc8785.dumps(value)


class _NotPlain(Exception):
    """A value that only the reference implementation writes right."""


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        if not all(map(str.isascii, value)):
            raise _NotPlain
        return {
            name: item if (t := type(item)) is str or (t is int and 0 <= item <= INTEGER_MAX) else _plain(item)
            for name, item in value.items()
        }
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if kind in _AS_THEY_ARE or (kind is int and -INTEGER_MAX <= value <= INTEGER_MAX):
        return value
    if kind is float and abs(value) <= INTEGER_MAX:
        if value.is_integer():
            return int(value)
        if abs(value) >= FRACTION_MIN:
            return value
    raise _NotPlain


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
