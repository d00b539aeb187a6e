"""A pool of the tiny real base on the shared stack: adapters that speak their markers, admitted and pointed at."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.launch.stack import Stack
from infra.objects import FileObjects
from producers.release.base import base_manifest, write_zero_adapter, zero_manifest
from producers.release.intake import hashed, store
from schemas.adapters import AdapterManifest, BaseAdded
from schemas.keys import KeyRole
from tests.factories import Entry, approved, configured, pointed, pool_of
from tests.models import BASE_NAME, TARGET_MODULES, tiny_base
from tests.world import PARTITIONS, World, key_of, world_of

RANK_MAX = 8


@dataclass(frozen=True, kw_only=True)
class Version:
    """An adapter of a tenant under an alias. The same files under another alias are another digest."""

    tenant: str
    alias: str
    files: Path
    rank: int = 4


@asynccontextmanager
async def real_world_on(
    stack: Stack, pool: str, base_dir: Path, versions: Sequence[Version], limits: Mapping[str, object]
) -> AsyncIterator[World]:
    """`base_dir` is where the tiny base is written. `limits` are fields of every TenantConfigured."""
    manifest = base_manifest(tiny_base(base_dir), BASE_NAME)
    objects = FileObjects(stack.objects_dir)
    zero_dir = base_dir.parent / "zero"
    zero_dir.mkdir()
    write_zero_adapter(manifest, RANK_MAX, zero_dir)
    files = await hashed(zero_dir)
    zero = zero_manifest(manifest, RANK_MAX, files)
    await store(objects, zero_dir, files, zero.encode())
    base = BaseAdded(base=manifest.digest, manifest=manifest, zero_adapter=zero.digest)
    key = key_of(stack, KeyRole.REGISTRY)
    entries: list[Entry] = [("adapters", base.base, base), approved(zero, key)]
    entries += [configured(tenant, **limits) for tenant in sorted({version.tenant for version in versions})]
    digests: dict[tuple[str, str], str] = {}
    for version in versions:
        adapter = await _stored(objects, base, version)
        digests[version.tenant, version.alias] = adapter.digest
        entries += [approved(adapter, key), pointed(version.tenant, version.alias, adapter.digest)]
    context_max = manifest.context_max
    entries.append(pool_of(base.base, pool, rank_max=RANK_MAX, context_max=context_max, partitions=PARTITIONS))
    async with world_of(stack, pool, base, digests, entries) as world:
        yield world


async def _stored(objects: FileObjects, base: BaseAdded, version: Version) -> AdapterManifest:
    files = await hashed(version.files)
    manifest = AdapterManifest(
        owner=version.tenant,
        base=base.base,
        tokenizer=base.manifest.tokenizer,
        files=files,
        rank=version.rank,
        alpha=str(version.rank),
        target_modules=TARGET_MODULES,
        dtype="float32",
        training_data_version=version.alias,
    )
    await store(objects, version.files, files, manifest.encode())
    return manifest
