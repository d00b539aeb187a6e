"""Residency at work: fetch, check, load, evict, and take a revoked adapter out of the engine for good."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from consumers.engines.protocol import AdapterInUse, Artifact, LoadFailed
from consumers.worker.doors import Doors
from consumers.worker.residency import PLATFORM, Choice, Hits, Owner, Resident, Slots, choose
from infra.artifacts import ArtifactBroken, fetch_artifact
from infra.logs import ActionLog
from infra.objects import ObjectCorrupt, ObjectStoreDown, ObjectUnknown
from schemas.adapters import AdapterDrained
from schemas.audit import AdapterEvicted, AdapterLoaded, AdapterLoadFailed, EvictReason, LoadReason
from schemas.errors import SwitchyardError
from schemas.topics import ADAPTERS

log = ActionLog("worker")

# Digests that must stay in their slots, and the owners with work: asked at the moment of an eviction, not before.
Wanted = Callable[[], frozenset[str]]
Working = Callable[[], Mapping[str, Owner]]

# The store may be away for a moment; longer than this and the waiting jobs are told so.
FETCH_TRIES_MAX = 5
FETCH_RETRY_S = 1.0


class NoSlot(SwitchyardError):
    """Every slot holds an adapter in use; it is tried again when one is free."""


class Unloadable(SwitchyardError):
    """This adapter cannot be made resident here. `code` says why, in the words of a failed job."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Adapters:
    """The engine's slots. Only one task loads, unloads and resets; the lock makes that so."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._lock = asyncio.Lock()
        self._hits = Hits()
        self._bytes: dict[str, int] = {}
        self._load_ms: dict[str, float] = {}
        self._quarantined: set[str] = set()
        self._leaving: set[str] = set()
        self._closed = False
        # Rises with every revocation, and with it every cache salt.
        self.salt_epoch = 0

    def used(self, digest: str) -> None:
        self._hits.hit(digest, self._doors.clock.monotonic())

    def owner_of(self, digest: str) -> str:
        """The tenant whose adapter it is, or the platform."""
        entry = self._doors.registry.adapters.get(digest)
        manifest = entry.manifest if entry is not None else None
        return (manifest.owner if manifest is not None else None) or PLATFORM

    def usable(self) -> frozenset[str]:
        """Resident digests that jobs may start under: one on its way out is none."""
        return self._doors.engine.resident() - self._leaving

    async def make_resident(self, digest: str, wanted: Wanted, working: Working, reason: LoadReason) -> float:
        """Load a digest, in the place of another where every slot is taken. Returns the milliseconds that it took.

        Raises NoSlot, Unloadable.
        """
        async with self._lock:
            if self._closed:
                raise NoSlot
            if digest in self._doors.engine.resident():
                return 0.0
            if digest in self._quarantined:
                raise Unloadable("adapter_quarantined", "this adapter failed to load here and is not tried again")
            problem = self._doors.registry.admission_problem(digest)
            if problem is not None:
                raise Unloadable(problem, "this adapter may not be loaded")
            began = self._doors.clock.monotonic()
            artifact = await self._fetch(digest)
            full = len(self._doors.engine.resident()) >= self._doors.engine.build.slots
            if full or self._at_most(digest):
                await self._make_room(digest, wanted, working)
            await self._load(artifact, reason)
            return (self._doors.clock.monotonic() - began) * 1000

    async def drain(self, digest: str, aborted: int) -> None:
        """The end of a revocation on this worker: caches reset, adapter out, and a receipt for it."""
        async with self._lock:
            self.salt_epoch += 1
            await self._doors.engine.reset_cache()
            was_resident = await self._evict(Choice(digest=digest, reason=EvictReason.REVOKED))
        receipt = AdapterDrained(
            adapter=digest,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            was_resident=was_resident,
            aborted_jobs=aborted,
        )
        await self._doors.publisher.publish(ADAPTERS.name, digest, receipt, subject=digest)
        log.info("adapter.drained", adapter=digest, was_resident=was_resident, aborted_jobs=aborted)

    async def close(self) -> None:
        """Put the end of every residency into the audit; the engine is about to stop."""
        async with self._lock:
            self._closed = True
            for digest in sorted(self._doors.engine.resident()):
                with contextlib.suppress(AdapterInUse):
                    await self._evict(Choice(digest=digest, reason=EvictReason.SHUTDOWN))

    def to_expel(self, in_use: frozenset[str]) -> frozenset[str]:
        """Quarantined digests that still hold a slot and that nothing runs under."""
        return (self._doors.engine.resident() & self._quarantined) - in_use

    async def expel(self, in_use: frozenset[str]) -> None:
        async with self._lock:
            for digest in sorted(self.to_expel(in_use)):
                await self._evict(Choice(digest=digest, reason=EvictReason.FAILED))

    def is_quarantined(self, digest: str) -> bool:
        return digest in self._quarantined

    def quarantine(self, digest: str) -> None:
        self._quarantined.add(digest)

    async def _make_room(self, digest: str, wanted: Wanted, working: Working) -> None:
        now, resident = self._doors.clock.monotonic(), self._doors.engine.resident()
        residents = [self._measured(name, now) for name in resident]
        slots = Slots(count=self._doors.engine.build.slots, residents=residents, working=working())
        floors = {name: tenant.slots_floor for name, tenant in self._doors.registry.tenants.items()}
        free = resident - wanted()
        if self._at_most(digest):
            free = frozenset(name for name in free if self.owner_of(name) == self.owner_of(digest))
        choice = choose(self.owner_of(digest), slots, free, floors)
        self._hits.forget(now)
        if choice is None:
            raise NoSlot
        await self._evict(choice)

    def _at_most(self, digest: str) -> bool:
        """Whether the owner of a digest has as many adapters here as it may have."""
        owner = self.owner_of(digest)
        tenant = self._doors.registry.tenants.get(owner)
        held = sum(self.owner_of(name) == owner for name in self._doors.engine.resident())
        return tenant is not None and held >= tenant.resident_adapters_max

    def _measured(self, digest: str, now: float) -> Resident:
        size, hits = self._bytes.get(digest, 0), self._hits.of(digest, now)
        return Resident.measured(digest, self.owner_of(digest), size, hits, self._load_ms.get(digest, 1.0))

    async def _evict(self, choice: Choice) -> bool:
        digest = choice.digest
        if digest not in self._doors.engine.resident():
            return False
        self._leaving.add(digest)
        began = self._doors.clock.monotonic()
        try:
            await self._doors.engine.unload(digest)
        finally:
            self._leaving.discard(digest)
        record = AdapterEvicted(
            adapter=digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=choice.reason,
            resident_bytes=self._bytes.pop(digest, 0),
            owner=self.owner_of(digest) or None,
            duration_ms=round((self._doors.clock.monotonic() - began) * 1000),
        )
        await self._doors.audit.append(digest, record)
        self._doors.metrics.count("adapter_evictions", reason=choice.reason.value)
        return True

    async def _fetch(self, digest: str) -> Artifact:
        manifest = self._doors.registry.adapters[digest].manifest
        if manifest is None:
            raise Unloadable("adapter_not_approved", "this adapter has no manifest")
        for tries_left in reversed(range(FETCH_TRIES_MAX)):
            try:
                path = await fetch_artifact(self._doors.objects, manifest, self._doors.cache)
            except (ObjectUnknown, ObjectCorrupt, ArtifactBroken) as error:
                await self._failed(digest, "artifact_broken")
                raise Unloadable("artifact_broken", "the stored adapter is not what its digest says") from error
            except (ObjectStoreDown, OSError) as error:
                if not tries_left:
                    raise Unloadable("artifact_unavailable", "the object store does not answer") from error
                await asyncio.sleep(FETCH_RETRY_S)
            else:
                size = sum(entry.size for entry in manifest.files)
                return Artifact(digest=digest, path=path, rank=manifest.rank, bytes=size)
        raise AssertionError("the last try returns or raises")

    async def _load(self, artifact: Artifact, reason: LoadReason) -> None:
        try:
            loaded = await self._doors.engine.load(artifact)
        except LoadFailed as error:
            await self._failed(artifact.digest, "load_failed")
            raise Unloadable("load_failed", "the engine refused this adapter") from error
        self._bytes[artifact.digest] = loaded.bytes
        self._load_ms[artifact.digest] = max(1.0, loaded.duration_ms)
        record = AdapterLoaded(
            adapter=artifact.digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=reason,
            duration_ms=round(loaded.duration_ms),
            resident_bytes=loaded.bytes,
            owner=self.owner_of(artifact.digest) or None,
        )
        await self._doors.audit.append(artifact.digest, record)
        self._doors.metrics.count("adapter_loads", result="loaded")
        self._doors.metrics.observe("adapter_load_seconds", loaded.duration_ms / 1000)
        self._doors.metrics.set("adapters_resident", len(self._doors.engine.resident()))

    async def _failed(self, digest: str, code: str) -> None:
        self._quarantined.add(digest)
        record = AdapterLoadFailed(
            adapter=digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            code=code,
        )
        await self._doors.audit.append(digest, record)
        self._doors.metrics.count("adapter_loads", result="failed")
        log.error("adapter.load_failed", adapter=digest, code=code)
