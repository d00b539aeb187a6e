"""The connections between the ledger and its Redis: TLS, and what the server closed while nobody used it."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from infra.launch.processes import free_port
from infra.launch.redis_native import redis_spec, redis_users
from infra.launch.start import Launcher
from infra.redis import CLUSTER, CLUSTER_TLS, TLS, connect
from infra.settings import BadSettings, KeeperSettings, RedisSettings, read
from ledger.functions.calls import library
from ledger.rebuild import Gate
from ledger.store import Ledger, LedgerUnavailable
from tests.certificates import Certificates, make_certificates

pytestmark = pytest.mark.redis

PASSWORDS = {role: f"secret-of-{role}" for role in redis_users()}
LOCAL = "unix://"
WAIT_S = 30.0


class Server:
    """A cluster of one Redis, which needs no telling apart from a single one. Its one port speaks TLS alone."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._port, self._socket = free_port(), folder / "redis.sock"
        self.certificates: Certificates = make_certificates(folder / "certificates")
        spec = redis_spec(folder, self._port, PASSWORDS, cluster=True)
        options = {
            "port": 0,
            "tls-port": self._port,
            "tls-cert-file": self.certificates.server,
            "tls-key-file": self.certificates.key,
            "tls-ca-cert-file": self.certificates.authority,
            "tls-auth-clients": "no",
            "tls-cluster": "yes",
            "cluster-enabled": "yes",
            # Its own plus 10,000 is no port where its own is high.
            "cluster-port": free_port(),
            "unixsocket": self._socket,
        }
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        launcher.start(replace(spec, argv=(*spec.argv, *more))).wait_ready()
        self.tell("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        until = time.monotonic() + WAIT_S
        while "cluster_state:ok" not in self.tell("CLUSTER", "INFO"):
            assert time.monotonic() < until
        self.tell("-x", "FUNCTION", "LOAD", said=library())

    def tell(self, *words: str, said: str = "") -> str:
        """As the administrator, past every client of ours."""
        login = ("--user", "admin", "--pass", PASSWORDS["admin"], "--no-auth-warning")
        asked = ("redis-cli", "-e", "-s", str(self._socket), *login, *words)
        return subprocess.run(asked, input=said, check=True, capture_output=True, text=True, timeout=30).stdout

    def settings(self, scheme: str, host: str = "127.0.0.1", ca_file: Path | None = None) -> RedisSettings:
        url = f"{scheme}{self._socket if scheme == LOCAL else f'{host}:{self._port}'}"
        return RedisSettings(url=url, username="admin", password=PASSWORDS["admin"], ca_file=ca_file)

    def believed(self, scheme: str) -> RedisSettings:
        return self.settings(scheme, ca_file=None if scheme == LOCAL else self.certificates.authority)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redis")
    with Launcher(folder, orderly=False) as launcher:
        yield Server(launcher, folder)


@pytest.mark.parametrize("scheme", [TLS, CLUSTER_TLS])
async def test_the_ledger_answers_over_tls_and_without_it_nobody_does(server: Server, scheme: str) -> None:
    async with aclosing(connect(server.believed(scheme))) as redis:
        gate = Gate(redis)
        assert await gate.raise_epoch() < await gate.raise_epoch()
    plain = {TLS: "redis://", CLUSTER_TLS: CLUSTER}[scheme]
    async with aclosing(connect(server.settings(plain))) as redis:
        with pytest.raises(LedgerUnavailable):
            await Ledger(redis).status()


@pytest.mark.parametrize("scheme", [TLS, CLUSTER_TLS])
async def test_a_server_that_nobody_vouches_for_is_refused(server: Server, scheme: str, tmp_path: Path) -> None:
    for ca_file in (None, make_certificates(tmp_path).authority):
        async with aclosing(connect(server.settings(scheme, ca_file=ca_file))) as redis:
            with pytest.raises(LedgerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await Ledger(redis).status()


async def test_a_server_of_another_name_is_refused(server: Server) -> None:
    settings = server.settings(TLS, host="localhost", ca_file=server.certificates.authority)
    async with aclosing(connect(settings)) as redis:
        with pytest.raises(LedgerUnavailable, match="not valid for 'localhost'"):
            await Ledger(redis).status()


@pytest.mark.parametrize("scheme", ["redis://", CLUSTER])
def test_a_ca_file_without_tls_is_refused(server: Server, scheme: str) -> None:
    with pytest.raises(BadSettings, match="rediss://"):
        connect(server.settings(scheme, ca_file=server.certificates.authority))


def test_a_ca_file_that_is_missing_is_named_by_its_variable(server: Server) -> None:
    environment = server.believed(TLS).environment()
    assert read(RedisSettings, environment) == server.believed(TLS)
    with pytest.raises(BadSettings, match="SWITCHYARD_REDIS_CA_FILE"):
        read(RedisSettings, {**environment, "SWITCHYARD_REDIS_CA_FILE": "/nowhere"})


def test_a_keeper_believes_whom_its_own_settings_name(server: Server) -> None:
    settings = server.believed(TLS)
    assert KeeperSettings(**settings.model_dump()).redis() == settings


@pytest.mark.parametrize("scheme", [TLS, CLUSTER_TLS, LOCAL])
async def test_connections_that_the_server_closed_while_idle_are_opened_anew_before_the_next_call(
    server: Server, scheme: str
) -> None:
    # Functions are called over a connection that calls share, and other commands over one each: two at once meet two.
    async with aclosing(connect(server.believed(scheme))) as redis:
        gate = Gate(redis)
        epoch = await gate.raise_epoch()
        await asyncio.gather(gate.load(), gate.load())
        assert int(await asyncio.to_thread(server.tell, "CLIENT", "KILL", "TYPE", "normal")) > 0
        await asyncio.gather(gate.load(), gate.load())
        assert await gate.raise_epoch() == epoch + 1
