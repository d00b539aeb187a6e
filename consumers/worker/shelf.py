"""What a worker knows of the adapters it holds, and what it tells the audit of their coming and going."""

from consumers.engines.protocol import Artifact
from consumers.worker.doors import Doors
from consumers.worker.residency import PLATFORM, Choice, Hits, Resident
from infra.logs import ActionLog
from schemas.audit import (
    AdapterEvicted,
    AdapterLoaded,
    AdapterLoadFailed,
    LoadReason,
    LoadSource,
    Place,
)

log = ActionLog("worker")


class Shelf:
    """Sizes, load times and hits by digest."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._hits = Hits()
        self._bytes: dict[str, int] = {}
        self._load_ms: dict[str, float] = {}

    def hit(self, digest: str) -> None:
        self._hits.hit(digest)

    def owner_of(self, digest: str) -> str:
        """The tenant whose adapter it is, or the platform."""
        entry = self._doors.registry.adapters.get(digest)
        manifest = entry.manifest if entry is not None else None
        return (manifest.owner if manifest is not None else None) or PLATFORM

    def bytes_of(self, digest: str) -> int:
        return self._bytes.get(digest, 0)

    def measured(self, digest: str, *, in_bytes: bool = False) -> Resident:
        """As the rule of residency sees it: a taker of one slot, or of its bytes."""
        size = self.bytes_of(digest)
        hits, load_ms = self._hits.of(digest), self._load_ms.get(digest, 1.0)
        return Resident.measured(digest, self.owner_of(digest), size, hits, load_ms, in_bytes=in_bytes)

    def forget_idle(self) -> None:
        self._hits.forget()

    async def came(
        self, artifact: Artifact, reason: LoadReason, place: Place, source: LoadSource, size: int, duration_ms: float
    ) -> None:
        """An adapter is in a slot, or in host memory, now."""
        digest = artifact.digest
        predicted = self._doors.engine.sizes.whole(artifact.rank, artifact.target_modules)
        self._bytes[digest] = size
        if source is LoadSource.STORE:
            self._load_ms[digest] = max(1.0, duration_ms)
            self._doors.metrics.set("adapter_bytes_error", size / predicted - 1 if predicted else 0.0)
        record = AdapterLoaded(
            adapter=digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=reason,
            duration_ms=round(duration_ms),
            resident_bytes=size,
            owner=self.owner_of(digest) or None,
            source=source,
            place=place,
        )
        await self._doors.audit.append(digest, record)
        self._doors.metrics.count("adapter_loads", result="loaded")
        self._doors.metrics.observe("adapter_load_seconds", duration_ms / 1000)
        self._show()

    async def left(self, choice: Choice, place: Place, duration_ms: float, *, kept: bool = False) -> None:
        """An adapter left its slot, or its copy the host memory; `kept` where a copy stays."""
        digest = choice.digest
        record = AdapterEvicted(
            adapter=digest,
            base=self._doors.base,
            worker=self._doors.worker,
            engine=self._doors.engine.build.id,
            reason=choice.reason,
            resident_bytes=self.bytes_of(digest),
            owner=self.owner_of(digest) or None,
            duration_ms=round(duration_ms),
            place=place,
            kept_in_host=kept,
        )
        if not kept:
            self._bytes.pop(digest, None)
            self._load_ms.pop(digest, None)
        await self._doors.audit.append(digest, record)
        self._doors.metrics.count("adapter_evictions", reason=choice.reason.value)
        self._show()

    async def failed(self, digest: str, code: str) -> None:
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

    def _show(self) -> None:
        self._doors.metrics.set("adapters_resident", len(self._doors.engine.resident()))
        self._doors.metrics.set("adapters_in_host", len(self._doors.engine.staged()))
