"""Run one of our modules on untrusted files, in a process that can do little else.

The process gets LIMITS MODULE ARGUMENT..., limits itself, then runs the module: bounded memory, CPU and time,
no file written, no socket, no further process. A second fence: what runs inside is our own parser, not their code.
"""

import asyncio
import contextlib
import json
import os
import resource
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schemas.errors import SwitchyardError

FORBIDDEN_EVENTS = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.remove",
                    "os.rename", "os.mkdir", "os.link", "os.symlink", "shutil.")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


# One thread: a pool of them would reserve more memory than the limit.
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


# Isolated from the environment and the folder it starts in, and still the code of this very process.
BOOT = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); "
    "from infra.sandbox import main; main(sys.argv[1:])"
)


class SandboxFailed(SwitchyardError):
    """The inspection did not end in order: it ran out of time or memory, or crashed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use."""

    memory_bytes: int = 2 << 30
    cpu_seconds: int = 60
    wall_seconds: int = 120
    output_bytes: int = 1 << 20


async def run_module(
    module: str, arguments: Sequence[str], content: bytes = b"", limits: Limits | None = None
) -> bytes:
    """What the module printed, given `content` on its standard input. Raises SandboxFailed."""
    limits = limits or Limits()
    process = await asyncio.create_subprocess_exec(
        *_command(limits, module, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        async with asyncio.timeout(limits.wall_seconds):
            output, complaint = await _converse(process, content, limits.output_bytes)
    except TimeoutError as error:
        raise SandboxFailed(f"the inspection took more than {limits.wall_seconds} seconds") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode != 0:
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise SandboxFailed(f"the inspection ended with status {process.returncode}: {last[0][:200]}")
    return output


class Servant:
    """A module that answers questions in a process of its own, started when it is needed and killed when it fails.

    Both sides write JSON after four bytes of length.
    """

    def __init__(self, module: str, limits: Limits) -> None:
        self._module = module
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._asking = False
        # Rises with every process that is gone.
        self.life = 0

    async def ask(self, question: object, seconds: float) -> Any:
        """One question and its answer. `Any` because JSON is. Raises SandboxFailed, with the process gone."""
        try:
            async with asyncio.timeout(seconds):
                return await self._ask(json.dumps(question).encode())
        except TimeoutError as error:
            raise SandboxFailed(f"there was no answer within {seconds:g} seconds") from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise SandboxFailed(f"the process gave no answer: {error}") from error
        finally:
            if self._asking:
                # Killed, so that no later question is answered with this one's answer.
                await self.stop()

    async def stop(self) -> None:
        process, self._process, self._asking = self._process, None, False
        if process is not None:
            self.life += 1
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, content: bytes) -> Any:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self._asking = True
        process.stdin.write(len(content).to_bytes(4, "big") + content)
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(4), "big")
        if length > self._limits.output_bytes:
            raise SandboxFailed(f"the answer has {length} bytes")
        answer = json.loads(await process.stdout.readexactly(length))
        self._asking = False
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *_command(self._limits, self._module, ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        return self._process


def _command(limits: Limits, module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-B", "-c", BOOT, json.dumps(asdict(limits)), module, *arguments]


async def _converse(process: asyncio.subprocess.Process, content: bytes, bytes_max: int) -> tuple[bytes, bytes]:
    """`communicate`, with a bound on what is kept of the output."""
    _, output, complaint = await asyncio.gather(
        _say(process.stdin, content), _hear(process.stdout, bytes_max), _hear(process.stderr, bytes_max)
    )
    await process.wait()
    return output, complaint


async def _say(pipe: asyncio.StreamWriter | None, content: bytes) -> None:
    assert pipe is not None
    # A module that reads no input closes the pipe: its status tells why.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def _hear(pipe: asyncio.StreamReader | None, bytes_max: int) -> bytes:
    assert pipe is not None
    content = bytearray()
    while chunk := await pipe.read(1 << 16):
        content += chunk
        if len(content) > bytes_max:
            raise SandboxFailed(f"the inspection printed more than {bytes_max} bytes")
    return bytes(content)


def main(arguments: list[str]) -> None:
    limits = Limits(**json.loads(arguments[0]))
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (most, most))
    sys.argv = arguments[1:]
    sys.addaudithook(_refuse)
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(FORBIDDEN_EVENTS):
        raise PermissionError(f"{event} is not allowed here")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        raise PermissionError("opening a file for writing is not allowed here")
