"""What the operator declares: bases, pools, tenants and keys."""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.client_quotas import set_client_quota
from infra.keys import keep_key, make_key
from infra.provision import Provisioner, add_tenant_to, parse_new_tenant, remove_tenant_from, rotate_tenant_on
from infra.settings import KafkaSettings, StackFile
from producers.release.base import TOKENIZER_FILES, BadBase, base_manifest, write_zero_adapter, zero_manifest
from producers.release.desk import Desk, Unknown
from producers.release.intake import hashed, store
from producers.release.publish import admit, point
from producers.release.tenant_file import Change
from schemas.adapters import AdapterRevoked, AliasPointed, BaseAdded, PoolConfigured
from schemas.errors import SwitchyardError
from schemas.ids import is_tenant, parse_tenant
from schemas.keys import KeyRevoked, KeyRole
from schemas.tenants import TenantConfigured, TenantState
from schemas.topics import ADAPTERS, KEYS, POOLS, TENANTS

ZERO_RANK = 8
# What is left is for tenants that nothing is reserved for.
RESERVED_MAX = 75


class BadPool(SwitchyardError):
    """The pool cannot be configured so."""


class KeyNotBelieved(SwitchyardError):
    """A private key has no published half."""


async def add_base(desk: Desk, directory: Path, name: str, rank: int = ZERO_RANK) -> BaseAdded:
    """Make a base known, with its zero adapter of this rank, admitted. Repeated, it changes nothing.

    Raises BadBase, BaseMismatch.
    """
    manifest = await asyncio.to_thread(base_manifest, directory, name)
    smallest = min([pool.rank_max for pool in desk.registry.pools.values() if pool.base == manifest.digest] + [rank])
    with tempfile.TemporaryDirectory(prefix="switchyard-") as folder:
        copy = Path(folder)
        await asyncio.to_thread(write_zero_adapter, manifest, smallest, copy)
        files = await hashed(copy)
        zero = zero_manifest(manifest, smallest, files)
        await store(desk.objects, copy, files, zero.encode())
    await desk.objects.put(manifest.encode())
    # Routers count prompts with these; the weights stay where the workers have them.
    for file in manifest.files:
        if file.path in TOKENIZER_FILES:
            await desk.objects.put(directory / file.path)
    known = desk.registry.bases.get(manifest.digest)
    if known is None:
        known = BaseAdded(base=manifest.digest, manifest=manifest, zero_adapter=zero.digest)
        await desk.append(ADAPTERS.name, manifest.digest, known)
    entry = desk.registry.adapters.get(known.zero_adapter)
    revoked = entry is not None and entry.revoked is not None
    if not revoked and desk.registry.admission_problem(known.zero_adapter) is not None:
        if known.zero_adapter != zero.digest:
            raise BadBase(f"this base is known with a zero adapter of another rank than {smallest}")
        await admit(desk, zero, None)
    return known


async def grant(desk: Desk, base: str, tenant: str, alias: str = "base") -> AliasPointed:
    """Let a tenant's alias name the base model itself, which runs under its zero adapter."""
    return await point(desk, tenant, alias, desk.base(base).zero_adapter)


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """What a pool serves, and whom: `tenants` None is every tenant; `reserved` is percent by tenant."""

    rank_max: int
    context_max: int
    partitions: int
    tenants: tuple[str, ...] | None = None
    reserved: Mapping[str, int] = field(default_factory=dict)
    # Engine builds whose workers count as ready; None: any.
    engines: tuple[str, ...] | None = None


async def set_pool(desk: Desk, admin: KafkaSettings, pool: str, base: str, shape: PoolShape) -> PoolConfigured:
    """Make a pool's topics and record what it serves. Raises BadPool, Unknown, InvalidName."""
    found, partitions = desk.base(base), shape.partitions
    rank_max, context_max = shape.rank_max, shape.context_max
    for tenant in (*(shape.tenants or ()), *shape.reserved):
        desk.tenant(tenant)
    if sum(shape.reserved.values()) > RESERVED_MAX:
        raise BadPool(f"{sum(shape.reserved.values())} % is reserved; at most {RESERVED_MAX} % may be")
    others = set(shape.reserved) - set(shape.tenants or shape.reserved)
    if others:
        raise BadPool(f"a part is reserved for {sorted(others)[0]}, which this pool does not serve")
    if not is_tenant(pool):
        raise BadPool(f"a pool is named by lower-case letters, digits and inner hyphens; this is none: {pool[:60]!r}")
    if context_max > found.manifest.context_max:
        raise BadPool(f"base {found.manifest.name} takes {found.manifest.context_max} tokens, not {context_max}")
    former = desk.registry.pools.get(pool)
    if former is not None and former.partitions > partitions:
        raise BadPool(f"pool {pool} has {former.partitions} partitions, and Kafka never takes one away")
    zero = desk.adapter(found.zero_adapter).manifest
    if zero is not None and rank_max < zero.rank:
        raise BadPool(f"base {found.manifest.name} has a zero adapter of rank {zero.rank}, above {rank_max}")
    await asyncio.to_thread(lambda: Provisioner(admin).add_pool(pool, partitions))
    configured = PoolConfigured(
        pool=pool, base=found.base, rank_max=rank_max, context_max=context_max, partitions=partitions,
        tenants=shape.tenants, reserved=dict(shape.reserved), engines=shape.engines,
    )  # fmt: skip
    if configured != former:
        await desk.append(POOLS.name, pool, configured)
    return configured


async def add_tenant(desk: Desk, stack: StackFile, configured: TenantConfigured) -> StackFile:
    """Make a tenant's topics, user, rights and Kafka quota, and record its limits; again: change its limits."""
    changed = await asyncio.to_thread(add_tenant_to, stack, parse_new_tenant(configured.tenant))
    rates = (configured.produce_bytes_per_s, configured.consume_bytes_per_s)
    await asyncio.to_thread(set_client_quota, stack.kafka("admin"), configured.tenant, *rates)
    # The record comes last: nobody is admitted whom Kafka does not limit yet.
    if desk.registry.tenants.get(configured.tenant) != configured:
        await desk.append(TENANTS.name, configured.tenant, configured)
    return changed


async def apply_change(desk: Desk, stack: StackFile, change: Change) -> None:
    """Record what a tenants' file asks for, and make what a new tenant needs. Repeated, it changes nothing."""
    configured = change.configured or desk.registry.tenants[change.tenant]
    await add_tenant(desk, stack, configured)
    for record in (*change.grants, *change.withdrawn):
        await desk.append(TENANTS.name, change.tenant, record)


async def rotate_tenant(desk: Desk, stack: StackFile, name: str) -> StackFile:
    """A new password for a tenant's Kafka user; the old one opens no connection any more."""
    return await asyncio.to_thread(rotate_tenant_on, stack, desk.tenant(name).tenant)


async def remove_tenant(desk: Desk, stack: StackFile, name: str) -> tuple[str, ...]:
    """Stop serving a tenant, revoke its adapters and take its Kafka user away; returns the digests revoked now.

    The record comes first, so whatever dies after it leaves admission stopped; a second run finishes the rest.
    Its topics stay as the record.
    """
    tenant = desk.registry.tenants.get(parse_tenant(name)) or desk.tenant(name)
    if tenant.state is not TenantState.REMOVED:
        removed = tenant.model_copy(update={"state": TenantState.REMOVED, "configured_by": desk.actor})
        await desk.append(TENANTS.name, name, removed)
    owned = [
        digest
        for digest, entry in desk.registry.adapters.items()
        if entry.manifest is not None and entry.manifest.owner == name and entry.revoked is None
    ]
    for digest in owned:
        revoked = AdapterRevoked(adapter=digest, reason="the tenant was removed", revoked_by=desk.actor)
        await desk.append(ADAPTERS.name, digest, revoked)
    await asyncio.to_thread(remove_tenant_from, stack, name)
    return tuple(owned)


async def init_keys(desk: Desk) -> dict[str, bool]:
    """Make and publish a key for every role that has none here; key id to whether it was made now.

    A key that is there but not believed was revoked, and stays so. Raises KeyNotBelieved.
    """
    made = {}
    for role in KeyRole:
        if not desk.keys.newest(role):
            made[await rotate_key(desk, role)] = True
            continue
        key_id = desk.keys.key_id(role)
        if key_id not in desk.registry.keys(role):
            raise KeyNotBelieved(
                f"{desk.keys.path(role)} is there, but the registry does not believe {key_id}; was it revoked? "
                f"Make the next one with: switchyard key rotate {role}"
            )
        made[key_id] = False
    return made


async def rotate_key(desk: Desk, role: KeyRole) -> str:
    """Publish and keep a role's next key; returns its id. The former ones are believed until they are revoked."""
    prefix = f"{role.value}-"
    known = [*desk.registry.published, *desk.registry.revoked_keys]
    numbers = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    key, published = make_key(role, 1 + max([desk.keys.newest(role), *(int(n) for n in numbers if n.isdecimal())]))
    await desk.append(KEYS.name, key.key_id, published)
    keep_key(desk.keys, key)
    return key.key_id


async def revoke_key(desk: Desk, key_id: str, reason: str) -> None:
    """Nothing that this key signed is believed from now on. Repeated, it changes nothing. Raises Unknown."""
    if key_id in desk.registry.revoked_keys:
        return
    if key_id not in desk.registry.published:
        raise Unknown(f"no key {key_id[:64]!r} was published; see: switchyard key list")
    await desk.append(KEYS.name, key_id, KeyRevoked(key_id=key_id, reason=reason))
