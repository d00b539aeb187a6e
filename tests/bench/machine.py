"""How busy others keep this machine while something is measured on it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.children import Say

BUSY_MAX = 0.3
LOOK_S = 2.0
LOOKS_MAX = 10


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """Processor time since boot: all that there was, what was used, and what this program and its children used."""

    total: int
    used: int
    ours: int

    def others_since(self, before: "Ticks") -> float:
        """The share of all processors' time that others used since then."""
        others = (self.used - before.used) - (self.ours - before.ours)
        return max(0.0, others / max(1, self.total - before.total))


async def quiet(section: str, say: Say) -> None:
    """Wait a little for the others to leave this machine alone."""
    for _ in range(LOOKS_MAX):
        before = ticks()
        await asyncio.sleep(LOOK_S)
        busy = ticks().others_since(before)
        if busy <= BUSY_MAX:
            return
        say(f"{section}: others use {busy:.0%} of this machine; waiting")


@asynccontextmanager
async def watched(section: str, say: Say) -> AsyncIterator[None]:
    """Measure inside: when it is over, a line says how much of this machine others used meanwhile."""
    await quiet(section, say)
    before, load = ticks(), os.getloadavg()[0]
    yield
    print(f"# load {section} {load:.2f} before, others used {ticks().others_since(before):.0%} meanwhile", flush=True)


def ticks() -> Ticks:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return Ticks(total=sum(fields), used=sum(fields) - idle, ours=_ours())


def _ours() -> int:
    """Of every process below this one, with the children that it has seen end."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            # Ended while we looked.
            continue
        pid = int(path.parent.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    return sum(ticks for pid, ticks in used.items() if _is_below(pid, os.getpid(), parents))


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid not in (0, root):
        pid = parents.get(pid, 0)
    return pid == root
