"""A file that says what tenants may use: read, checked and compared with what is recorded. Pure.

TOML, one table per tenant; `[tenant.grants.alias]` is what an alias is granted. What is left out stays as it is.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from schemas.errors import SwitchyardError
from schemas.ids import parse_alias, parse_tenant
from schemas.jobs import JobClass
from schemas.record import describe
from schemas.tenants import AliasGranted, AliasWithdrawn, TenantConfigured

Kind = TypeVar("Kind", TenantConfigured, AliasGranted)
Grants = Mapping[tuple[str, str], AliasGranted]
# Fields of the records that a file does not set.
_OURS = frozenset({"type", "version", "tenant", "state", "configured_by", "granted_by", "alias"})


class BadTenantFile(SwitchyardError):
    """The file does not say what tenants may use."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one tenant's table asks for beyond what is recorded. All empty: nothing changes."""

    tenant: str
    configured: TenantConfigured | None
    grants: tuple[AliasGranted, ...] = ()
    withdrawn: tuple[AliasWithdrawn, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """What would be recorded, one line each."""
        lines = [f"{self.tenant}: limits change"] if self.configured is not None else []
        lines += [f"{self.tenant}: {grant.alias} is granted ({grant.entitlement})" for grant in self.grants]
        return lines + [f"{self.tenant}: {gone.alias} is withdrawn" for gone in self.withdrawn]


def changes_in(text: str, tenants: Mapping[str, TenantConfigured], grants: Grants, actor: str) -> list[Change]:
    """What a file asks for. Raises BadTenantFile, InvalidName."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadTenantFile(f"this is not TOML: {error}") from error
    if not document:
        raise BadTenantFile("the file names no tenant")
    return [_change(parse_tenant(name), table, tenants, grants, actor) for name, table in document.items()]


def _change(tenant: str, table: Any, tenants: Mapping[str, TenantConfigured], grants: Grants, actor: str) -> Change:
    """`Any` because TOML is; every value is checked by the record that it goes into."""
    if not isinstance(table, dict):
        raise BadTenantFile(f"[{tenant}] is not a table")
    limits = {name: value for name, value in table.items() if name != "grants"}
    former = tenants.get(tenant)
    known = former.model_dump(exclude={"configured_by", "state"}) if former is not None else {"tenant": tenant}
    configured = _record(TenantConfigured, {**known, "configured_by": actor}, limits, f"[{tenant}]")
    changed = former is None or configured != former.model_copy(update={"configured_by": actor})
    found: list[AliasGranted] = []
    gone: list[AliasWithdrawn] = []
    for alias, grant in _table(table.get("grants", {}), f"[{tenant}.grants]").items():
        where = f"[{tenant}.grants.{parse_alias(alias)}]"
        current = grants.get((tenant, alias))
        if grant is False:
            withdrawn = AliasWithdrawn(tenant=tenant, alias=alias, reason="by the tenants' file", withdrawn_by=actor)
            gone += [withdrawn] if current is not None else []
            continue
        wanted = _grant(tenant, alias, _table(grant, where), actor, where)
        if current is None or wanted != current.model_copy(update={"granted_by": actor}):
            found.append(wanted)
    return Change(tenant=tenant, configured=configured if changed else None, grants=tuple(found), withdrawn=tuple(gone))


def _grant(tenant: str, alias: str, table: dict[str, Any], actor: str, where: str) -> AliasGranted:
    given = dict(table)
    for name, field in (("not_before", "not_before_ms"), ("expires", "expires_at_ms")):
        if name in given:
            given[field] = _milliseconds(given.pop(name), f"{where} {name}")
    return _record(AliasGranted, {"tenant": tenant, "alias": alias, "granted_by": actor}, given, where)


def _record(kind: type[Kind], ours: dict[str, Any], given: dict[str, Any], where: str) -> Kind:
    """A record of what a table gives over what is known. A field that a file does not set is unknown in it."""
    unknown = sorted(given.keys() & _OURS)
    if unknown:
        raise BadTenantFile(f"{where}: '{unknown[0]}' is not set by a file")
    values = {**ours, **given}
    if "classes" in given:
        values["classes"] = _classes(given["classes"], where)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadTenantFile(f"{where}: {describe(error)}") from error


def _classes(value: Any, where: str) -> tuple[JobClass, ...]:
    names = [item.value for item in JobClass]
    if not isinstance(value, list) or not set(value) <= set(names):
        raise BadTenantFile(f"{where} classes is a list of: {', '.join(names)}")
    return tuple(JobClass(name) for name in value)


def _milliseconds(value: Any, where: str) -> int:
    if not isinstance(value, datetime):
        raise BadTenantFile(f"{where} is a time, such as 2027-01-01T00:00:00Z")
    return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadTenantFile(f"{where} is not a table")
    return value
