"""Measurements in a process of their own."""

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
