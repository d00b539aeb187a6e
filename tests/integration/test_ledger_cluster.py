"""The ledger on a Redis Cluster of three primaries with a replica each, and across its failovers."""

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError, ResponseError

from infra.launch.plan import ProcessSpec
from infra.launch.processes import free_port
from infra.launch.redis_native import redis_spec, redis_users
from infra.launch.start import Launcher, Process
from infra.redis import CLUSTER, Client, connect
from infra.settings import RedisSettings
from ledger import keys
from ledger.answers import Admission, AdmitAnswer, Closed, Full, Granted, Settled
from ledger.fold import LogFold
from ledger.rebuild import Gate
from ledger.store import Ledger, LedgerUnavailable
from schemas.jobs import JobClass
from tests.contracts.ledger_bench import Bench
from tests.contracts.ledger_suite import LedgerSuite
from tests.contracts.test_ledger import RedisBench
from tests.fakes_ledger import USED, make_admission, make_admitted, make_decision, make_usage

pytestmark = pytest.mark.slow

NODES = 6
# The port of a node's bus is its own plus 10,000: below those that the system gives to any client.
PORT_MAX = 22_000
PASSWORDS = {role: f"secret-of-{role}" for role in redis_users()}
NODE_TIMEOUT_MS = 1_000
WAIT_S = 30.0
PLACES = 20


class Cluster:
    """Six processes, made one."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self._specs: dict[int, ProcessSpec] = {}
        while len(self._specs) < NODES:
            port = free_port()
            if port < PORT_MAX:
                self._specs[port] = node_spec(folder / str(port), port)
        self.processes: dict[int, Process] = {}
        for port in self._specs:
            self.start(port)
        nodes = [f"127.0.0.1:{port}" for port in self._specs]
        made = ["redis-cli", "--user", "admin", "--pass", PASSWORDS["admin"], "--cluster", "create", *nodes]
        subprocess.run([*made, "--cluster-replicas", "1", "--cluster-yes"], check=True, capture_output=True, timeout=60)

    def start(self, port: int) -> None:
        self.processes[port] = self._launcher.start(self._specs[port])
        self.processes[port].wait_ready()

    def settings(self, role: str = "admin") -> RedisSettings:
        nodes = ",".join(f"127.0.0.1:{port}" for port in self._specs)
        return RedisSettings(url=CLUSTER + nodes, username=role, password=PASSWORDS[role])

    def node(self, port: int) -> Client:
        """A client of this node alone."""
        return connect(RedisSettings(url=f"redis://127.0.0.1:{port}/0", username="admin", password=PASSWORDS["admin"]))

    async def primary(self) -> int | None:
        """Who says of itself that it has the ledger's slot, if anybody."""
        for port in self._specs:
            client = self.node(port)
            try:
                # A replica, and a primary of other slots, say who has it instead.
                await client.exists(keys.GATE)
                return port
            except RedisError:
                continue
            finally:
                await client.aclose()
        return None

    async def replica_of(self, port: int) -> int:
        """The replica of this primary that has its data."""
        client = self.node(port)
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    found: dict[str, Any] = await client.info("replication")
                    if found["connected_slaves"] and found["slave0"]["state"] == "online":
                        return int(found["slave0"]["port"])
                    await asyncio.sleep(0.05)
        finally:
            await client.aclose()


def node_spec(folder: Path, port: int) -> ProcessSpec:
    spec = redis_spec(folder, port, PASSWORDS, cluster=True)
    more = (
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        str(NODE_TIMEOUT_MS),
        "--repl-diskless-sync-delay",
        "0",
    )
    replicating = ("--masteruser", "admin", "--masterauth", PASSWORDS["admin"])
    return replace(spec, name=f"redis-{port}", argv=(*spec.argv, *more, *replicating))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Launcher(folder, orderly=False) as launcher:
        yield Cluster(launcher, folder)


async def reopen(gate: Gate, fold: LogFold | None = None) -> None:
    """As a keeper does, of this log: again, where the cluster has not settled."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await rebuilt(gate, fold)
            except LedgerUnavailable:
                await asyncio.sleep(0.05)


async def rebuilt(gate: Gate, fold: LogFold | None) -> None:
    await gate.load()
    epoch = await gate.raise_epoch()
    await gate.clear(epoch)
    await gate.restore(epoch, (fold or LogFold()).each(await gate.now_us()))
    await gate.open(epoch)


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Client]:
    client = connect(cluster.settings())
    await answered(Ledger(client))
    await client.flushall()
    await reopen(Gate(client))
    yield client
    await client.aclose()


class TestCluster(LedgerSuite):
    @pytest.fixture
    async def bench(self, admin: Client) -> Bench:
        return RedisBench(admin)


async def answered(ledger: Ledger) -> bool:
    """Wait until the ledger answers, and say whether it is open."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return (await ledger.status()).open
            except LedgerUnavailable:
                await asyncio.sleep(0.05)


class Router:
    """Asks without a pause, and keeps what it was granted in its log."""

    def __init__(self, ledger: Ledger) -> None:
        self.log = LogFold()
        self.granted: set[str] = set()
        self.met_closed = asyncio.Event()
        self._ledger = ledger

    async def run(self, asks: list[Admission]) -> None:
        for ask in itertools.cycle(asks):
            try:
                self.heard(ask, await self._ledger.admit(ask))
            except LedgerUnavailable:
                await asyncio.sleep(0.01)

    def heard(self, ask: Admission, answer: AdmitAnswer) -> None:
        match answer:
            case Granted(admitted_at_us=at_us, epoch=epoch, lift=lift):
                self.granted.add(ask.job_id)
                self.log.apply(make_admitted(ask, at_us, epoch, lift), at_us // 1000)
            case Closed():
                self.met_closed.set()
            case _:
                assert isinstance(answer, Full)


async def killed(cluster: Cluster, _: Client) -> None:
    """The primary is gone; a replica takes its place, after the nodes agree that it is gone."""
    port = await cluster.primary()
    assert port is not None
    # Without a replica that has the data, nobody would follow.
    await cluster.replica_of(port)
    cluster.processes[port].kill()
    async with asyncio.timeout(WAIT_S):
        while await cluster.primary() is None:
            await asyncio.sleep(0.05)
    cluster.start(port)


async def handed_over(cluster: Cluster, _: Client) -> None:
    """The primary hands over to its replica in order, and refuses calls from then on."""
    port = await cluster.primary()
    assert port is not None
    async with asyncio.timeout(WAIT_S), cluster.node(await cluster.replica_of(port)) as replica:
        while await cluster.primary() in (None, port):
            # Given up by the nodes where it takes them too long.
            with contextlib.suppress(ResponseError):
                await replica.execute_command("CLUSTER", "FAILOVER")  # type: ignore[no-untyped-call]
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("failover", [killed, handed_over])
async def test_after_a_failover_the_ledger_is_closed_until_it_is_rebuilt_and_then_right(
    cluster: Cluster, admin: Client, failover: Callable[[Cluster, Client], Awaitable[None]]
) -> None:
    gate, router_redis, settler_redis = (
        Gate(admin),
        *(connect(cluster.settings(role)) for role in ("router", "settler")),
    )
    ledger, settler, now_us = Ledger(router_redis), Ledger(settler_redis), await gate.now_us()
    router = Router(ledger)
    decision = make_decision(job_class=JobClass.BATCH, expires_at_ms=now_us // 1000 + 600_000)
    asks = [make_admission(f"job-{n}", decision, concurrency_max=PLACES, window_max=1_000) for n in range(PLACES * 2)]
    router.heard(asks[0], await ledger.admit(asks[0]))
    assert await settler.settle("acme", "job-0", asks[0].ingress, USED) == Settled(repeated=False)
    router.log.apply(make_usage(asks[0]), now_us // 1000)

    asking = asyncio.create_task(router.run(asks[1:]))
    await failover(cluster, admin)
    async with asyncio.timeout(WAIT_S):
        await router.met_closed.wait()
    asking.cancel()
    assert not await answered(Ledger(admin))
    assert await ledger.admit(asks[1]) == Closed()
    assert len(router.granted) <= PLACES + 1

    await reopen(gate, router.log)
    assert await gate.rows() == router.log.rows(await gate.now_us())
    for ask in asks[1:]:
        answer = await ledger.admit(ask)
        if ask.job_id in router.granted:
            assert isinstance(answer, Granted)
            assert answer.repeated
        router.heard(ask, answer)
    assert len(router.granted) == PLACES + 1
    assert (await ledger.status()).tenants == {"acme": PLACES}
    for redis in (router_redis, settler_redis):
        await redis.aclose()


@pytest.mark.parametrize("together", [1, 2])
async def test_connections_that_the_nodes_closed_while_idle_are_opened_anew_before_the_next_call(
    cluster: Cluster, admin: Client, together: int
) -> None:
    # Calls of one moment travel as a pipeline, a single one does not.
    ledger = Ledger(admin)
    assert await answered(ledger)
    for port in cluster.processes:
        async with cluster.node(port) as node:
            await node.execute_command("CLIENT", "KILL", "TYPE", "normal")  # type: ignore[no-untyped-call]
    assert all(status.open for status in await asyncio.gather(*(ledger.status() for _ in range(together))))
