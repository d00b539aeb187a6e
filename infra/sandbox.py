"""Run one of our modules on untrusted files, in a process that can do little else.

`python -m infra.sandbox LIMITS MODULE ARGUMENT...` limits itself, then runs the module: bounded memory, CPU and time,
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

from schemas.errors import SwitchyardError

FORBIDDEN_EVENTS = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.remove",
                    "os.rename", "os.mkdir", "os.link", "os.symlink", "shutil.")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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
        sys.executable, "-I", "-B", "-m", "infra.sandbox", json.dumps(asdict(limits)), module, *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # One thread: a pool of them would reserve more memory than the limit.
        env={"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
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


if __name__ == "__main__":
    main(sys.argv[1:])
