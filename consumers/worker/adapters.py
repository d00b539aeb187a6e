"""Residency at work: fetch, check, load, evict, and take a revoked adapter out of the engine for good."""

import asyncio
import contextlib
from collections.abc import Callable

from consumers.engines.protocol import AdapterInUse, Artifact, LoadFailed
from consumers.worker.doors import Doors
from consumers.worker.residency import victim
from infra.artifacts import ArtifactBroken, fetch_artifact
from infra.logs import ActionLog
from infra.objects import ObjectCorrupt, ObjectStoreDown, ObjectUnknown
from schemas.adapters import AdapterDrained
from schemas.audit import AdapterEvicted, AdapterLoaded, AdapterLoadFailed, EvictReason, LoadReason
from schemas.errors import SwitchyardError
from schemas.topics import ADAPTERS

log = ActionLog("worker")

# Digests that must stay in their slots.
Wanted = Callable[[], frozenset[str]]

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
        self._last_used: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._quarantined: set[str] = set()
        self._leaving: set[str] = set()
        self._closed = False
        # Rises with every revocation, and with it every cache salt.
        self.salt_epoch = 0

    def used(self, digest: str) -> None:
        self._last_used[digest] = self._doors.clock.monotonic()

    def usable(self) -> frozenset[str]:
        """Resident digests that jobs may start under: one on its way out is none."""
        return self._doors.engine.resident() - self._leaving

    async def make_resident(self, digest: str, wanted: Wanted) -> None:
        """Load a digest, in the place of one that nobody wants where every slot is taken.

        `wanted` is asked at the moment of the eviction, not before. Raises NoSlot, Unloadable.
        """
        async with self._lock:
            if self._closed:
                raise NoSlot
            if digest in self._doors.engine.resident():
                return
            if digest in self._quarantined:
                raise Unloadable("adapter_quarantined", "this adapter failed to load here and is not tried again")
            problem = self._doors.registry.admission_problem(digest)
            if problem is not None:
                raise Unloadable(problem, "this adapter may not be loaded")
            artifact = await self._fetch(digest)
            if len(self._doors.engine.resident()) >= self._doors.engine.build.slots:
                await self._make_room(wanted)
            await self._load(artifact)

    async def drain(self, digest: str, aborted: int) -> None:
        """The end of a revocation on this worker: caches reset, adapter out, and a receipt for it."""
        async with self._lock:
            self.salt_epoch += 1
            await self._doors.engine.reset_cache()
            was_resident = await self._evict(digest, EvictReason.REVOKED)
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
                    await self._evict(digest, EvictReason.SHUTDOWN)

    def to_expel(self, in_use: frozenset[str]) -> frozenset[str]:
        """Quarantined digests that still hold a slot and that nothing runs under."""
        return (self._doors.engine.resident() & self._quarantined) - in_use

    async def expel(self, in_use: frozenset[str]) -> None:
        async with self._lock:
            for digest in sorted(self.to_expel(in_use)):
                await self._evict(digest, EvictReason.FAILED)

    def is_quarantined(self, digest: str) -> bool:
        return digest in self._quarantined

    def quarantine(self, digest: str) -> None:
        self._quarantined.add(digest)

    async def _make_room(self, wanted: Wanted) -> None:
        resident = self._doors.engine.resident()
        leaving = victim({d: self._last_used.get(d, 0.0) for d in resident}, wanted())
        if leaving is None:
            raise NoSlot
        await self._evict(leaving, EvictReason.TURN)

    async def _evict(self, digest: str, reason: EvictReason) -> bool:
        if digest not in self._doors.engine.resident():
            return False
        self._leaving.add(digest)
        try:
            await self._doors.engine.unload(digest)
        finally:
            self._leaving.discard(digest)
        record = AdapterEvicted(
            adapter=digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=reason,
            resident_bytes=self._bytes.pop(digest, 0),
        )
        await self._doors.audit.append(digest, record)
        self._doors.metrics.count("adapter_evictions", reason=reason.value)
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

    async def _load(self, artifact: Artifact) -> None:
        try:
            loaded = await self._doors.engine.load(artifact)
        except LoadFailed as error:
            await self._failed(artifact.digest, "load_failed")
            raise Unloadable("load_failed", "the engine refused this adapter") from error
        self.used(artifact.digest)
        self._bytes[artifact.digest] = loaded.bytes
        record = AdapterLoaded(
            adapter=artifact.digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=LoadReason.JOB,
            duration_ms=round(loaded.duration_ms),
            resident_bytes=loaded.bytes,
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
