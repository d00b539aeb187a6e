"""The sandbox: what a module may not do in it, and that its end, whatever it is, is one error."""

from pathlib import Path

import pytest

from infra.sandbox import Limits, SandboxFailed, run_module

# What a door that was open would leave behind.
TRACE = Path("/tmp/switchyard-was-here")


def left_behind() -> bool:
    return TRACE.exists()


async def run_code(code: str, limits: Limits | None = None, content: bytes = b"") -> bytes:
    """Run code by way of a module of the standard library that executes an argument."""
    return await run_module("timeit", ("-n", "1", "-r", "1", "-s", code, "pass"), content, limits)


async def test_a_module_gets_its_input_and_gives_its_output() -> None:
    assert b"HELLO" in await run_code("import sys; print(sys.stdin.read().upper())", content=b"hello")


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "open('/tmp/switchyard-was-here', 'w')",
        "import os; os.mkdir('/tmp/switchyard-was-here')",
        "import os; os.open('/tmp/switchyard-was-here', os.O_CREAT | os.O_RDWR)",
    ],
)
async def test_doors_are_closed(code: str) -> None:
    with pytest.raises(SandboxFailed, match="is not allowed here"):
        await run_code(code)
    assert not left_behind()


async def test_too_much_memory_ends_it() -> None:
    with pytest.raises(SandboxFailed, match="MemoryError"):
        await run_code("x = bytearray(3 << 30)")


async def test_too_much_time_ends_it() -> None:
    with pytest.raises(SandboxFailed, match="more than 1 seconds"):
        await run_code("import time; time.sleep(60)", Limits(wall_seconds=1))


async def test_too_much_work_ends_it() -> None:
    with pytest.raises(SandboxFailed, match="ended with status"):
        await run_code("while True: pass", Limits(cpu_seconds=1))


async def test_too_much_output_ends_it() -> None:
    with pytest.raises(SandboxFailed, match="more than 1000 bytes"):
        await run_code("print('x' * 100_000)", Limits(output_bytes=1000))


async def test_a_crash_is_told_with_its_last_line() -> None:
    with pytest.raises(SandboxFailed, match="ended with status 1: ValueError: broken"):
        await run_code("raise ValueError('broken')")


async def test_the_inspection_imports_no_model_library_and_no_environment_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    probe = (
        "import os, sys, producers.release.inspect; "
        "print(sorted({'torch', 'peft', 'transformers', 'safetensors', 'aiokafka'} & set(sys.modules)), "
        "'SECRET_OF_OURS' in os.environ)"
    )
    assert b"[] False" in await run_code(probe)
