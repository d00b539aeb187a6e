"""Which digest an engine holds under which integer id, where, and how many requests run under it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from consumers.engines.protocol import (
    AdapterInUse,
    AdapterMissing,
    Artifact,
    EngineSettings,
    HostFull,
    LoadFailed,
    SlotsFull,
)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What an engine says that it holds: ids in slots, and the bytes of each copy in host memory by id."""

    slots: frozenset[int]
    host: Mapping[int, int]


class Residents:
    """The engine's own table. vLLM picks weights by integer id and KV by name: an id is one digest's for life."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._ids: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._slots: set[str] = set()
        self._uses: Counter[str] = Counter()
        self._fresh_ids = count(1)

    @property
    def digests(self) -> frozenset[str]:
        """Those in a slot."""
        return frozenset(self._slots)

    @property
    def staged(self) -> frozenset[str]:
        """Those in host memory, which are all."""
        return frozenset(self._ids)

    @property
    def listed(self) -> Listed:
        """What the engine must list."""
        host = {self._ids[digest]: size for digest, size in self._bytes.items()}
        return Listed(slots=frozenset(self._ids[digest] for digest in self._slots), host=host)

    def id_of(self, digest: str) -> int:
        return self._ids[digest]

    def bytes_of(self, digest: str) -> int:
        return self._bytes[digest]

    def fresh_id(self, artifact: Artifact, expected_bytes: int) -> int:
        """An id for a copy. It is burnt by being handed out: a failed load leaves vLLM's half-active under its id."""
        if artifact.digest.removeprefix("sha256:") not in str(artifact.path):
            raise LoadFailed(f"the path of {artifact.digest} does not contain its digest")
        self.expect_room(expected_bytes)
        return next(self._fresh_ids)

    def expect_room(self, size: int) -> None:
        held = sum(self._bytes.values())
        if len(self._ids) >= self._settings.copies_max or held + size > self._settings.host_bytes:
            raise HostFull(f"{len(self._ids)} adapters of {held} bytes leave no room for one of {size}")

    def expect_free_slot(self) -> None:
        if len(self._slots) >= self._settings.slots:
            raise SlotsFull

    def stage(self, digest: str, int_id: int, size: int) -> None:
        self._ids[digest], self._bytes[digest] = int_id, size

    def unstage(self, digest: str) -> int:
        if digest in self._slots:
            raise AdapterInUse
        del self._bytes[digest]
        return self._ids.pop(digest)

    def fill_slot(self, digest: str) -> None:
        self._slots.add(digest)

    def clear_slot(self, digest: str) -> int:
        """From here on no request can enter under the digest."""
        if self._uses[digest]:
            raise AdapterInUse
        self._slots.remove(digest)
        return self._ids[digest]

    def enter(self, digest: str) -> int:
        if digest not in self._slots:
            raise AdapterMissing
        self._uses[digest] += 1
        return self._ids[digest]

    def leave(self, digest: str) -> None:
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest]
