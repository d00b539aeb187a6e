"""A pool of a test's own on the shared stack: a base, adapters with real artifacts, tenants, all in the log."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from infra.clock import SystemClock
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from infra.objects import FileObjects
from infra.provision import Provisioner
from ledger.registry import Registry
from schemas.adapters import AdapterManifest, BaseAdded
from schemas.digest import digest_of
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from tests.factories import (
    Entry,
    approved,
    configured,
    make_base,
    make_manifest,
    make_registry,
    pointed,
    pool_of,
    published,
    with_grants,
)

PARTITIONS = 4


@dataclass(frozen=True, kw_only=True)
class World:
    """What a test's pool holds. `digests` maps (tenant, alias) to the adapter it points at."""

    stack: Stack
    pool: str
    base: BaseAdded
    digests: dict[tuple[str, str], str]
    registry: Registry
    publisher: Publisher

    def key(self, role: KeyRole) -> SigningKey:
        return key_of(self.stack, role)

    async def append(self, entries: Sequence[Entry]) -> None:
        for topic, key, record in entries:
            await self.publisher.publish(topic, key, record)

    async def read(self, topic: str) -> list[Incoming]:
        """Everything on a topic so far, by partition and offset."""
        settings = self.stack.kafka("admin")
        ends = await end_offsets(settings, topic)
        return [r for partition in sorted(ends) async for r in read_range(settings, topic, partition)]


def key_of(stack: Stack, role: KeyRole) -> SigningKey:
    keys = stack.file.keys
    return SigningKey.from_pem(keys.key_id(role), role, keys.path(role).read_bytes())


@asynccontextmanager
async def make_world_on(
    stack: Stack, pool: str, aliases: Mapping[str, Sequence[str]], rows: Mapping[str, object] | None = None
) -> AsyncIterator[World]:
    """`aliases` names each tenant's adapters; each tenant also gets the base model as `base`.

    `rows` are fields of every TenantConfigured.
    """
    base = make_base(f"base of {pool}")
    zero = await _stored(stack, base, None, f"zero of {pool}")
    base = base.model_copy(update={"zero_adapter": zero.digest})
    registry_key = key_of(stack, KeyRole.REGISTRY)
    entries: list[Entry] = [("adapters", base.base, base), approved(zero, registry_key)]
    digests: dict[tuple[str, str], str] = {}
    for tenant, names in aliases.items():
        entries += [configured(tenant, **(rows or {})), pointed(tenant, "base", zero.digest)]
        digests[tenant, "base"] = zero.digest
        for name in names:
            manifest = await _stored(stack, base, tenant, f"{name} of {tenant}")
            digests[tenant, name] = manifest.digest
            entries += [approved(manifest, registry_key), pointed(tenant, name, manifest.digest)]
    entries.append(pool_of(base.base, pool, partitions=PARTITIONS))
    async with world_of(stack, pool, base, digests, entries) as world:
        yield world


@asynccontextmanager
async def world_of(
    stack: Stack, pool: str, base: BaseAdded, digests: dict[tuple[str, str], str], told: Sequence[Entry]
) -> AsyncIterator[World]:
    """The world that these records tell of: its pool has topics, and the records and grants for them are in the log."""
    await asyncio.to_thread(Provisioner(stack.kafka("admin")).add_pool, pool)
    entries = with_grants(told)
    publisher = Publisher(stack.kafka("admin"), f"world-{pool}", SystemClock())
    await publisher.start()
    try:
        keys = [published(key_of(stack, role)) for role in KeyRole]
        world = World(
            stack=stack,
            pool=pool,
            base=base,
            digests=digests,
            registry=make_registry([*keys, *entries]),
            publisher=publisher,
        )
        await world.append(entries)
        yield world
    finally:
        await publisher.stop()


async def _stored(stack: Stack, base: BaseAdded, owner: str | None, name: str) -> AdapterManifest:
    """An adapter whose one file is in the object store. The fake engine asks no more of it."""
    manifest = make_manifest(base.base, base.manifest.tokenizer, owner=owner, name=name)
    objects = FileObjects(stack.objects_dir)
    (entry,) = manifest.files
    stored = await objects.put(name.encode())
    assert stored == entry.sha256 == digest_of(name.encode())
    await objects.put(manifest.encode())
    return manifest
