"""Which digest sits in an engine under which integer id, and how many requests run under it."""

from collections import Counter
from itertools import count

from consumers.engines.protocol import AdapterInUse, AdapterMissing, Artifact, LoadFailed, SlotsFull


class Residents:
    """The engine's own table. vLLM picks weights by integer id and KV by name: an id is one digest's for life."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._ids: dict[str, int] = {}
        self._uses: Counter[str] = Counter()
        self._fresh_ids = count(1)

    def __contains__(self, digest: str) -> bool:
        return digest in self._ids

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._ids)

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def fresh_id(self, artifact: Artifact) -> int:
        """An id for a load. It is burnt by being handed out: a failed load leaves vLLM's half-active under its id."""
        if artifact.digest.removeprefix("sha256:") not in str(artifact.path):
            raise LoadFailed(f"the path of {artifact.digest} does not contain its digest")
        if len(self._ids) >= self._slots:
            raise SlotsFull
        return next(self._fresh_ids)

    def add(self, digest: str, int_id: int) -> None:
        self._ids[digest] = int_id

    def remove(self, digest: str) -> int:
        """From here on no request can enter under the digest."""
        if self._uses[digest]:
            raise AdapterInUse
        return self._ids.pop(digest)

    def enter(self, digest: str) -> int:
        if digest not in self._ids:
            raise AdapterMissing
        self._uses[digest] += 1
        return self._ids[digest]

    def leave(self, digest: str) -> None:
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest]
