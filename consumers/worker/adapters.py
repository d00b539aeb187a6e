"""Residency at work: fetch, check, stage, load, evict, and take a revoked adapter out of the engine for good."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from consumers.engines.protocol import AdapterInUse, Artifact, HostFull, LoadFailed
from consumers.worker.doors import Doors
from consumers.worker.residency import Choice, Owner, Slots, choose
from consumers.worker.shelf import Shelf
from infra.artifacts import ArtifactBroken, fetch_artifact
from infra.logs import ActionLog
from infra.objects import ObjectCorrupt, ObjectStoreDown, ObjectUnknown
from schemas.adapters import AdapterDrained
from schemas.audit import EvictReason, LoadReason, LoadSource, Place
from schemas.errors import SwitchyardError
from schemas.topics import ADAPTERS

log = ActionLog("worker")

Result = TypeVar("Result")
# Digests that must stay in their slots, and the owners with work: asked at the moment of an eviction, not before.
Wanted = Callable[[], frozenset[str]]
Working = Callable[[], Mapping[str, Owner]]

# The store may be away for a moment; longer than this and the waiting jobs are told so.
FETCH_TRIES_MAX = 5
FETCH_RETRY_S = 1.0
# One part in so many of the host memory is left to loads that a job waits for: a prefetch never takes it.
HEADROOM_PARTS = 8
# What leaves its slot for these leaves the host memory, too.
FOR_GOOD = frozenset({EvictReason.REVOKED, EvictReason.FAILED, EvictReason.SHUTDOWN})


class NoSlot(SwitchyardError):
    """Every slot holds an adapter in use, or host memory is full of them; it is tried again when one is free."""


class Unloadable(SwitchyardError):
    """This adapter cannot be made resident here. `code` says why, in the words of a failed job."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What bringing an adapter here took, and whether it came from the store, which tenants are limited in."""

    load_ms: float = 0.0
    from_store: bool = False


class Adapters:
    """The engine's slots and host memory. Only one task loads, unloads and resets; the lock makes that so."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._shelf = Shelf(doors)
        self._lock = asyncio.Lock()
        # Of those in host memory: what it takes to bring them from there into a slot.
        self._artifacts: dict[str, Artifact] = {}
        self._quarantined: set[str] = set()
        self._leaving: set[str] = set()
        self._closed = False
        # Rises with every revocation, and with it every cache salt.
        self.salt_epoch = 0

    def used(self, digest: str) -> None:
        self._shelf.hit(digest)

    def owner_of(self, digest: str) -> str:
        """The tenant whose adapter it is, or the platform."""
        return self._shelf.owner_of(digest)

    def usable(self) -> frozenset[str]:
        """Resident digests that jobs may start under: one on its way out is none."""
        return self._doors.engine.resident() - self._leaving

    def in_host(self) -> frozenset[str]:
        return self._doors.engine.staged()

    async def make_resident(self, digest: str, wanted: Wanted, working: Working, reason: LoadReason) -> Brought:
        """Put a digest into a slot, in the place of another where every slot is taken.

        Raises NoSlot, Unloadable.
        """
        async with self._lock:
            if self._closed:
                raise NoSlot
            if digest in self._doors.engine.resident():
                return Brought()
            self._expect_loadable(digest)
            began, staged = self._doors.clock.monotonic(), digest in self._artifacts
            artifact = self._artifacts[digest] if staged else await self._fetch(digest, FETCH_TRIES_MAX)
            full = len(self._doors.engine.resident()) >= self._doors.engine.build.slots
            if full or self._at_most(digest):
                await self._make_room(digest, wanted, working)
            if not staged:
                await self._make_host_room(artifact, wanted, working)
            await self._load(artifact, reason)
            return Brought(load_ms=self._since_ms(began), from_store=not staged)

    async def prefetch(self, digest: str) -> Brought:
        """Copy a digest into host memory while nobody needs it yet. Evicts nothing, waits for nothing.

        Raises NoSlot where there is no room beyond the headroom, and Unloadable.
        """
        self._expect_loadable(digest)
        began = self._doors.clock.monotonic()
        # Outside the lock: a slow store must not hold up a load that a job waits for.
        artifact = await self._fetch(digest, 1)
        async with self._lock:
            if digest in self._doors.engine.staged():
                return Brought()
            self._expect_loadable(digest)
            build = self._doors.engine.build
            if self._closed or not self._fits(artifact, build.host_bytes - build.host_bytes // HEADROOM_PARTS):
                raise NoSlot
            staged = await self._told(artifact, self._doors.engine.stage(artifact))
            await self._shelf.came(
                artifact, LoadReason.PREFETCH, Place.HOST, LoadSource.STORE, staged.bytes, staged.duration_ms
            )
            return Brought(load_ms=self._since_ms(began), from_store=True)

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
            for digest in sorted(self._doors.engine.staged()):
                with contextlib.suppress(AdapterInUse):
                    await self._evict(Choice(digest=digest, reason=EvictReason.SHUTDOWN))

    async def shed(self) -> int:
        """Drop every copy that is in no slot: memory is short. Returns how many there were."""
        async with self._lock:
            spare = sorted(self._doors.engine.staged() - self._doors.engine.resident())
            for digest in spare:
                await self._drop_copy(Choice(digest=digest, reason=EvictReason.MEMORY))
            return len(spare)

    def to_expel(self, in_use: frozenset[str]) -> frozenset[str]:
        """Quarantined digests that the engine still holds and that nothing runs under."""
        return (self._doors.engine.staged() & self._quarantined) - in_use

    async def expel(self, in_use: frozenset[str]) -> None:
        async with self._lock:
            for digest in sorted(self.to_expel(in_use)):
                await self._evict(Choice(digest=digest, reason=EvictReason.FAILED))

    def is_quarantined(self, digest: str) -> bool:
        return digest in self._quarantined

    def quarantine(self, digest: str) -> None:
        self._quarantined.add(digest)

    def _expect_loadable(self, digest: str) -> None:
        if digest in self._quarantined:
            raise Unloadable("adapter_quarantined", "this adapter failed to load here and is not tried again")
        problem = self._doors.registry.admission_problem(digest)
        if problem is not None:
            raise Unloadable(problem, "this adapter may not be loaded")

    async def _make_room(self, digest: str, wanted: Wanted, working: Working) -> None:
        """A free slot."""
        resident = self._doors.engine.resident()
        residents = [self._shelf.measured(name) for name in resident]
        slots = Slots(count=self._doors.engine.build.slots, residents=residents, working=working())
        floors = {name: tenant.slots_floor for name, tenant in self._doors.registry.tenants.items()}
        free = resident - wanted()
        if self._at_most(digest):
            free = frozenset(name for name in free if self.owner_of(name) == self.owner_of(digest))
        choice = choose(self.owner_of(digest), slots, free, floors)
        self._shelf.forget_idle()
        if choice is None:
            raise NoSlot
        await self._evict(choice)

    def _at_most(self, digest: str) -> bool:
        """Whether the owner of a digest has as many adapters here as it may have."""
        owner = self.owner_of(digest)
        tenant = self._doors.registry.tenants.get(owner)
        held = sum(self.owner_of(name) == owner for name in self._doors.engine.resident())
        return tenant is not None and held >= tenant.resident_adapters_max

    def _fits(self, artifact: Artifact, budget: int) -> bool:
        """Whether a copy of an adapter fits beside those that are in host memory."""
        engine = self._doors.engine
        held = sum(self._shelf.bytes_of(name) for name in engine.staged())
        needed = engine.sizes.predicted(artifact.rank, artifact.target_modules)
        return len(engine.staged()) < engine.build.copies_max and held + needed <= budget

    async def _make_host_room(self, artifact: Artifact, wanted: Wanted, working: Working) -> None:
        """Room in host memory: by the same rule, in bytes, and copies that are in no slot go first."""
        engine = self._doors.engine
        needed = engine.sizes.predicted(artifact.rank, artifact.target_modules)
        if needed > engine.build.host_bytes:
            raise Unloadable("adapter_too_large", "this adapter is larger than the host memory for adapters")
        owners = {name: Owner(weight=owner.weight) for name, owner in working().items()}
        while not self._fits(artifact, engine.build.host_bytes):
            copies = [self._shelf.measured(name, in_bytes=True) for name in engine.staged()]
            budget = Slots(count=engine.build.host_bytes, residents=copies, working=owners)
            owner, free = self.owner_of(artifact.digest), engine.staged() - wanted()
            choice = choose(owner, budget, free - engine.resident(), units=needed)
            choice = choice or choose(owner, budget, free, units=needed)
            if choice is None:
                raise NoSlot
            # One that is in a slot leaves that first, and is a spare copy at the next look.
            await self._evict(choice)

    async def _evict(self, choice: Choice) -> bool:
        """Out of its slot, and out of host memory too where it leaves for good."""
        digest = choice.digest
        if digest not in self._doors.engine.resident():
            return await self._drop_copy(choice)
        self._leaving.add(digest)
        began, keep = self._doors.clock.monotonic(), choice.reason not in FOR_GOOD
        try:
            await self._doors.engine.unload(digest, keep)
        finally:
            self._leaving.discard(digest)
        if not keep:
            self._artifacts.pop(digest, None)
        await self._shelf.left(choice, Place.SLOT, self._since_ms(began), kept=keep)
        return True

    async def _drop_copy(self, choice: Choice) -> bool:
        """Of one that is in no slot."""
        digest = choice.digest
        if digest not in self._doors.engine.staged():
            return False
        began = self._doors.clock.monotonic()
        await self._doors.engine.unstage(digest)
        self._artifacts.pop(digest, None)
        await self._shelf.left(choice, Place.HOST, self._since_ms(began))
        return True

    async def _fetch(self, digest: str, tries: int) -> Artifact:
        manifest = self._doors.registry.adapters[digest].manifest
        if manifest is None:
            raise Unloadable("adapter_not_approved", "this adapter has no manifest")
        for tries_left in reversed(range(tries)):
            try:
                path = await fetch_artifact(self._doors.objects, manifest, self._doors.cache)
            except (ObjectUnknown, ObjectCorrupt, ArtifactBroken) as error:
                await self._fail(digest, "artifact_broken")
                raise Unloadable("artifact_broken", "the stored adapter is not what its digest says") from error
            except (ObjectStoreDown, OSError) as error:
                if not tries_left:
                    raise Unloadable("artifact_unavailable", "the object store does not answer") from error
                await asyncio.sleep(FETCH_RETRY_S)
            else:
                size = sum(entry.size for entry in manifest.files)
                modules = manifest.target_modules
                return Artifact(digest=digest, path=path, rank=manifest.rank, bytes=size, target_modules=modules)
        raise AssertionError("the last try returns or raises")

    async def _load(self, artifact: Artifact, reason: LoadReason) -> None:
        loaded = await self._told(artifact, self._doors.engine.load(artifact))
        await self._shelf.came(artifact, reason, Place.SLOT, loaded.source, loaded.bytes, loaded.duration_ms)

    async def _told(self, artifact: Artifact, bringing: Awaitable[Result]) -> Result:
        """What the engine says of a copy or a load: it is in host memory then, or nothing of it is left."""
        try:
            result = await bringing
        except HostFull as error:
            raise NoSlot from error
        except LoadFailed as error:
            self._artifacts.pop(artifact.digest, None)
            await self._fail(artifact.digest, "load_failed")
            raise Unloadable("load_failed", "the engine refused this adapter") from error
        self._artifacts[artifact.digest] = artifact
        return result

    async def _fail(self, digest: str, code: str) -> None:
        self._quarantined.add(digest)
        await self._shelf.failed(digest, code)

    def _since_ms(self, began: float) -> float:
        return (self._doors.clock.monotonic() - began) * 1000
