"""Measurements in a process of their own, and whether this machine is quiet enough to measure on."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from infra.launch.processes import ENGINE_ENVIRONMENT
from schemas.errors import SwitchyardError

Say = Callable[[str], None]
Result = TypeVar("Result", bound=BaseModel)

REPOSITORY = Path(__file__).parents[2]
CHILD_S = 240.0
LINES_SHOWN = 15
BUSY_MAX = 0.3
BUSY_LOOK_S = 2.0
QUIET_TRIES_MAX = 5


class BenchFailed(SwitchyardError):
    """A measurement could not be made."""


async def measured_by(module: str, task: BaseModel, result: type[Result]) -> Result:
    """Run `python -m module TASK RESULT` and return what it wrote. No process is left, however this ends."""
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as folder:
        asked, answered, log = (Path(folder) / name for name in ("task.json", "result.json", "log"))
        asked.write_text(task.model_dump_json())
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, str(asked), str(answered),
                cwd=REPOSITORY, env={**os.environ, **ENGINE_ENVIRONMENT}, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                async with asyncio.timeout(CHILD_S):
                    await process.wait()
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if process.returncode:
            lines = log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
            raise BenchFailed("\n".join([f"{module} ended with code {process.returncode}:", *lines]))
        return result.model_validate_json(answered.read_bytes())


async def quiet(section: str, say: Say) -> None:
    """Wait a little for a machine that others use to be idle, and print how it was when the measurement began."""
    busy = await _busy()
    for _ in range(QUIET_TRIES_MAX):
        if busy <= BUSY_MAX:
            break
        say(f"{section}: others use {busy:.0%} of this machine; waiting")
        busy = await _busy()
    print(f"# load {section} {os.getloadavg()[0]:.2f} others {busy:.0%}", flush=True)


async def _busy() -> float:
    """The share of all processors' time that was used while nothing of ours ran."""
    before = _times()
    await asyncio.sleep(BUSY_LOOK_S)
    idle, total = (after - earlier for after, earlier in zip(_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _times() -> tuple[int, int]:
    """Idle and total time since boot, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
