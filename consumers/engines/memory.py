"""Where an engine's memory goes, part by part, beside what the system counts; and what an adapter will take of it."""

import ctypes
import ctypes.util
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Shape = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, all measured but `staging`, which is set aside. On a CPU, host and device are one memory."""

    host_is_device: bool
    base_weights: int
    # All slots, and those among them that hold an adapter.
    slots: int
    slots_used: int
    # Copies of adapters in host memory, and what is set aside for the copy that is being made.
    host_cache: int
    staging: int = 0
    # The runtime and what a step needs: what was occupied when the engine had started, less base, slots and KV.
    workspace: int
    kv_cache: int
    # What the allocator keeps for nobody: freed, and not given back.
    fragmentation: int
    # What the system counts: the resident pages of the engine's process on a CPU, what is taken of a GPU.
    process: int
    # What the engine may occupy.
    limit: int

    @property
    def accounted(self) -> int:
        """The sum of the parts that `process` must show."""
        parts = self.base_weights + self.slots + self.workspace + self.kv_cache + self.fragmentation
        return parts + (self.host_cache if self.host_is_device else 0)

    @property
    def unexplained(self) -> int:
        """What the system counts and no part claims; negative where a part claims pages that are not resident."""
        return self.process - self.accounted


@dataclass
class Sizes:
    """What adapters take in host memory here: by rank and modules from the engine's own tensors, never from files.

    `per_rank` is bytes per rank of each module, over all layers. A shape that was loaded is known to the byte.
    """

    per_rank: Mapping[str, int] = field(default_factory=dict)
    slot_bytes: int = 0
    measured: dict[Shape, int] = field(default_factory=dict)

    def predicted(self, rank: int, modules: Sequence[str]) -> int:
        """Bytes of an adapter of this shape. No modules are all of them; one that is unknown is taken for the largest.

        An adapter may leave layers out, so this is the most that its shape can take.
        """
        return self.measured.get(_shape(rank, modules), self.whole(rank, modules))

    def whole(self, rank: int, modules: Sequence[str]) -> int:
        """Bytes by the table alone, whatever was seen."""
        largest = max(self.per_rank.values(), default=0)
        names = modules or tuple(self.per_rank)
        return rank * sum(self.per_rank.get(name, largest) for name in names)

    def learn(self, rank: int, modules: Sequence[str], size: int) -> None:
        """The largest that was seen: layers may differ from one adapter to the next."""
        shape = _shape(rank, modules)
        self.measured[shape] = max(size, self.measured.get(shape, 0))


def _shape(rank: int, modules: Sequence[str]) -> Shape:
    return rank, tuple(sorted(modules))


def resident_bytes() -> int:
    """Resident pages of this process (proc_pid_statm(5))."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def available_bytes() -> int:
    """What this process could still get, by the machine and by its control group, in that order of need."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return machine
    return machine if most == "max" else min(machine, int(most) - used)


def free_in_allocator() -> int:
    """Bytes that malloc holds and nobody uses (mallinfo(3)); zero where the C library cannot tell."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo
    return int(library.mallinfo2().fordblks)


def give_back() -> None:
    """Give the allocator's free pages back to the system (malloc_trim(3)), where it can."""
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [  # ctypes asks for a plain list.
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
