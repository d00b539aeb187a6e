"""A real S3 server for tests: versitygw, built once by Go into .cache, started on a free port."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.s3 import s3_client
from infra.settings import ObjectSettings

CACHE = Path(__file__).parent.parent / ".cache" / "versitygw"
PACKAGE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
START_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class Gateway:
    """A running server, whose buckets are folders."""

    endpoint: str
    folder: Path

    def bucket(self, name: str) -> ObjectSettings:
        settings = ObjectSettings(
            endpoint=self.endpoint, bucket=name, access_key="tests", secret_key="tests-secret", secure=False
        )
        s3_client(settings).make_bucket(name)
        return settings


def program() -> Path:
    """The server's program. Skips the test where it can neither be found nor built."""
    path = CACHE / "versitygw"
    if path.exists():
        return path
    if shutil.which("go") is None:
        pytest.skip("versitygw is not built and Go is not installed")
    built = subprocess.run(
        ["go", "install", PACKAGE], env={**os.environ, "GOBIN": str(CACHE)}, capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        pytest.skip(f"Go could not build versitygw: {built.stderr[-200:]}")
    return path


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[Gateway]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [program(), "--port", endpoint, "posix", folder],
        env={**os.environ, "ROOT_ACCESS_KEY": "tests", "ROOT_SECRET_KEY": "tests-secret"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, time.monotonic() + START_SECONDS_MAX)
        yield Gateway(endpoint, folder)
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"versitygw does not listen on port {port}")
