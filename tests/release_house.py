"""A base, a pool and a tenant of a test's own on the shared stack, with a desk to release at."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from infra.clock import SystemClock
from infra.kafka.publisher import Publisher
from infra.launch.stack import Stack
from producers.release import platform, publish
from producers.release.desk import Desk, open_desk
from producers.release.platform import PoolShape
from producers.release.publish import Submission
from schemas.adapters import AdapterGated, BaseAdded, GateReport, WorkerReady
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from schemas.tenants import TenantConfigured
from schemas.topics import ADAPTERS, WORKERS, Role
from tests.release_files import filled, good_adapter, good_tensors, small_base, write_tensors
from tests.world import key_of

_names = count(1)


class House:
    """A base, a pool and a tenant of the test's own, with a desk to release at."""

    def __init__(self, stack: Stack, desk: Desk, tenant: str, base: BaseAdded, folder: Path) -> None:
        self.stack = stack
        self.desk = desk
        self.tenant = tenant
        self.base = base
        self.folder = folder

    def submission(self, value: float = 0.25, alias: str | None = "support") -> Submission:
        """An adapter whose weights all have this value: another value is another digest."""
        directory = good_adapter(self.folder / f"adapter-{next(_names)}")
        changed = {name: filled(tensor.shape, value) for name, tensor in good_tensors().items()}
        write_tensors(directory, changed)
        return Submission(directory=directory, tenant=self.tenant, alias=alias, base=self.base.base)

    async def report(self, digest: str, passed: bool = True, key: SigningKey | None = None) -> None:
        """Report on an adapter as a gate does, with the gate's key unless another is given."""
        signer = key or key_of(self.stack, KeyRole.GATE)
        report = GateReport(
            adapter=digest, engine="tests", passed=passed, load_ms=1, resident_bytes=1, prompts=4,
            differing=4 if passed else 0, problems=() if passed else ("no effect",),
        )  # fmt: skip
        gated = AdapterGated(adapter=digest, report=report, key_id=signer.key_id, signature=signer.sign(report))
        await self.desk.append(ADAPTERS.name, digest, gated)

    async def approved(self, value: float = 0.25) -> str:
        digest = (await publish.submit(self.desk, self.submission(value))).digest
        await self.report(digest)
        await publish.approve(self.desk, digest)
        return digest


@asynccontextmanager
async def house_on(stack: Stack, folder: Path) -> AsyncIterator[House]:
    name = f"house-{next(_names)}"
    async with open_desk(stack.file, SystemClock(), "tests") as desk:
        base = await platform.add_base(desk, small_base(folder / "base"), name, rank=2)
        await platform.set_pool(
            desk, stack.kafka("admin"), name, base.base, PoolShape(rank_max=4, context_max=128, partitions=1)
        )
        await platform.add_tenant(desk, stack.file, TenantConfigured(tenant=name, configured_by="tests"))
        yield House(stack, desk, name, base, folder)


async def announce(house: House, worker: str, partitions: tuple[int, ...]) -> None:
    """Say that a worker serves partitions of the house's pool."""
    record = WorkerReady(
        worker=worker, pool=house.tenant, base=house.base.base, engine="fake", slots=2, rows=4, partitions=partitions
    )
    publisher = Publisher(house.stack.kafka(Role.WORKER), "tests", SystemClock())
    await publisher.start()
    try:
        where = await publisher.publish(WORKERS.name, worker, record)
    finally:
        await publisher.stop()
    await house.desk.wait(lambda: house.desk.registry.positions.get(WORKERS.name, 0) > where.offset, 10)
