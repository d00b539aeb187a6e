"""The ledger suite on the fold and on a real Redis."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from infra.redis import Client, connect
from ledger.rebuild import Gate
from ledger.store import Ledger
from tests.conftest import RedisServer
from tests.contracts.ledger_bench import Bench
from tests.contracts.ledger_suite import LedgerSuite
from tests.fakes_ledger import MemoryLedger


class FoldBench(Bench):
    """The fold; time moves when it is told to."""

    def __init__(self) -> None:
        self.ledger: Ledger = MemoryLedger()

    @property
    def memory(self) -> MemoryLedger:
        assert isinstance(self.ledger, MemoryLedger)
        return self.ledger

    async def now_ms(self) -> int:
        return self.memory.now_us // 1000

    async def pass_ms(self, milliseconds: int) -> None:
        self.memory.now_us += milliseconds * 1000

    async def shut(self) -> None:
        self.memory.books.raise_epoch(0)


class RedisBench(Bench):
    """A real Redis; time passes by itself and is waited for on Redis' own clock."""

    def __init__(self, admin: Client) -> None:
        self.gate = Gate(admin)
        self.ledger: Ledger = Ledger(admin)

    async def now_ms(self) -> int:
        return await self.gate.now_us() // 1000

    async def pass_ms(self, milliseconds: int) -> None:
        until = await self.now_ms() + milliseconds
        while await self.now_ms() < until:
            await asyncio.sleep(0.002)

    async def shut(self) -> None:
        await self.gate.raise_epoch()


class TestFold(LedgerSuite):
    @pytest.fixture
    def bench(self) -> Bench:
        return FoldBench()


class TestRedis(LedgerSuite):
    @pytest.fixture
    async def bench(self, redis_server: RedisServer) -> AsyncIterator[Bench]:
        admin = connect(redis_server.redis("admin"))
        bench = RedisBench(admin)
        await bench.gate.load()
        await bench.gate.open(await bench.gate.raise_epoch())
        yield bench
        await admin.aclose()
