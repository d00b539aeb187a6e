"""What every record is: a closed, frozen JSON object that says its own type and version."""

import json
from typing import Annotated, Any, Generic, NoReturn, Self, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from schemas.digest import canonical
from schemas.errors import InvalidRecord
from schemas.ids import Count, Digest, TenantId

# What a tenant may append; what the platform writes around it may be twice as large.
RECORD_BYTES_MAX = 1 << 20
ENVELOPE_BYTES_MAX = 2 << 20
# A recursive parser must not be handed a tower of brackets.
JSON_DEPTH_MAX = 16
# Enough to mend a record by; more would echo what was sent.
PROBLEMS_SHOWN_MAX = 3

RecordKind = TypeVar("RecordKind", bound="Record")


class Value(BaseModel):
    """A closed value inside records."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Record(Value):
    """A record of the log. A subclass fixes `type`; `version` rises with every change of meaning."""

    type: str
    version: int

    def encode(self) -> bytes:
        """Canonical bytes (RFC 8785): equal records have equal bytes."""
        return canonical(self.model_dump(mode="json"))

    @classmethod
    def decode(cls, content: bytes | None) -> Self:
        """Parse bytes from outside. Raises InvalidRecord with a sentence that says what to mend."""
        return decode_one_of((cls,), content)

    @classmethod
    def type_name(cls) -> str:
        return str(cls.model_fields["type"].default)


class Identity(Value):
    """Whose work this is and what it runs on. Carried unchanged by every record of an admitted job."""

    tenant: TenantId
    base: Digest
    adapter: Digest
    tokenizer: Digest


class Coordinates(Value):
    """A place in the log."""

    topic: str
    partition: Count
    offset: Count

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


def decode_one_of(kinds: tuple[type[RecordKind], ...], content: bytes | None) -> RecordKind:
    """Parse bytes as one of a topic's record types, told apart by `type`.

    `type` may be left out where only one is possible, so that plain JSON from any client is a record.
    Raises InvalidRecord.
    """
    if content is None:
        raise InvalidRecord("the record has no value (a tombstone)")
    document = strict_json(content)
    if not isinstance(document, dict):
        raise InvalidRecord("the record is not a JSON object")
    named = {kind.type_name(): kind for kind in kinds}
    default = next(iter(named)) if len(named) == 1 else None
    kind = named.get(document.get("type", default))  # type: ignore[arg-type]
    if kind is None:
        raise InvalidRecord(f"'type' must be one of: {', '.join(sorted(named))}")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise InvalidRecord(describe(error)) from error


class PlatformDecoder(Generic[RecordKind]):
    """Parses records of a topic that only the platform writes, in one pass: their form was made by `encode`.

    A rebuild reads hundreds of thousands of them while nothing is admitted.
    """

    def __init__(self, *kinds: type[RecordKind]) -> None:
        # `Any` because a union that is made at run time has no type of its own.
        union: Any = Annotated[Union[kinds], Field(discriminator="type")] if len(kinds) > 1 else kinds[0]  # noqa: UP007
        self._adapter: TypeAdapter[RecordKind] = TypeAdapter(union)

    def decode(self, content: bytes | None) -> RecordKind:
        """Raises InvalidRecord."""
        try:
            return self._adapter.validate_json(content or b"")
        except ValidationError as error:
            raise InvalidRecord(describe(error)) from error


def strict_json(content: bytes, bytes_max: int = ENVELOPE_BYTES_MAX) -> Any:
    """Parse JSON as every parser would read it: no duplicate keys, NaN, BOM, lone surrogates or towers.

    `Any` because JSON is. Raises InvalidRecord.
    """
    if len(content) > bytes_max:
        raise InvalidRecord(f"the record has {len(content)} bytes; at most {bytes_max} are taken")
    try:
        text = content.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite)
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"the record is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise InvalidRecord(f"the JSON is nested deeper than {JSON_DEPTH_MAX}") from error
    except ValueError as error:
        raise InvalidRecord(f"the record is not JSON: {str(error)[:120]}") from error
    if isinstance(document, dict | list):
        _check_depth(document, JSON_DEPTH_MAX)
    return document


def describe(error: ValidationError) -> str:
    """The first problems in words a client can act on, without echoing what was sent."""
    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'record'}: {problem['msg']}"
        for problem in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    more = len(problems) - PROBLEMS_SHOWN_MAX
    tail = f" (and {more} more)" if more > 0 else ""
    return ("; ".join(problems[:PROBLEMS_SHOWN_MAX]) + tail)[:500]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("an object names the same key twice")
    return document


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_depth(document: Any, levels_left: int) -> None:
    if levels_left < 0:
        raise InvalidRecord(f"the JSON is nested deeper than {JSON_DEPTH_MAX}")
    for child in document.values() if isinstance(document, dict) else document:
        if isinstance(child, dict | list):
            _check_depth(child, levels_left - 1)
