"""A ledger that is lost under load is closed at once, and opened again from the log by whoever keeps it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import count
from typing import TypeVar

import pytest
from confluent_kafka import Producer
from redis.asyncio import Redis

from infra.clock import SystemClock
from infra.kafka.publisher import AuditWriter, Publisher
from infra.launch.plan import StackOptions
from infra.launch.stack import Stack, running_stack
from infra.redis import connect
from ledger.answers import Admission, Closed, Granted, Settled, Unknown
from ledger.fold import used_of
from ledger.keeper import REBUILDING, Keeper
from ledger.rebuild import check
from ledger.store import Ledger, LedgerUnavailable
from schemas.jobs import JobClass
from schemas.topics import AUDIT, METERING
from tests.conftest import RedisServer
from tests.factories import IN_WORDS
from tests.fakes_ledger import at, make_admission, make_admitted, make_decision, make_route, make_started, make_usage

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(240)]

CONCURRENCY_MAX = 10
CLIENTS = 16
LOSSES = 5
JOBS_BETWEEN = 60
# Events in the log, two for each job.
EVENTS = 100_000
OPEN_S = 10.0
WAIT_S = 60.0
LOOK_S = 0.002
_numbers = count(1)
Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Kafka of these tests' own: other tests read the whole audit."""
    with running_stack(StackOptions(home=tmp_path_factory.mktemp("kept"), orderly=False, prompts=IN_WORDS)) as stack:
        yield stack


async def until(answer: Callable[[], Awaitable[Answer | Closed]]) -> Answer:
    """Ask until the ledger is there and open, as every process of ours does."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(LedgerUnavailable):
                found = await answer()
                if not isinstance(found, Closed):
                    return found
            await asyncio.sleep(LOOK_S)


class Load:
    """Routers, workers and settlers in one: jobs from their admission to their settlement, one after another."""

    def __init__(self, ledger: Ledger, publisher: Publisher, audit: AuditWriter) -> None:
        self.tenant = f"kept-{next(_numbers)}"
        self.over = asyncio.Event()
        self.finished = 0
        self.ledger = ledger
        self.publisher = publisher
        self.audit = audit

    async def work(self) -> None:
        while not self.over.is_set():
            expires_at_ms = SystemClock().now_ms() + 600_000
            decision = make_decision(self.tenant, job_class=JobClass.BATCH, expires_at_ms=expires_at_ms)
            ask = make_admission(f"job-{next(_numbers)}", decision, concurrency_max=CONCURRENCY_MAX, window_max=1000)
            answer = await until(lambda: self.ledger.admit(ask))  # noqa: B023
            if isinstance(answer, Granted):
                await self.finish(ask, answer)
            await asyncio.sleep(LOOK_S)

    async def finish(self, ask: Admission, granted: Granted) -> None:
        life = (granted.admitted_at_us, granted.epoch, granted.lift)
        digest = ask.decision.identity.adapter
        await self.audit.append(digest, make_admitted(ask, *life))
        request = at("requests.main")
        while isinstance(await until(lambda: self.ledger.begin(self.tenant, ask.job_id, request, "7.0")), Unknown):
            await until(lambda: self.ledger.adopt(make_route(ask, *life)))
        await self.audit.append(digest, make_started(ask, 1, request))
        usage = make_usage(ask)
        await self.publisher.publish(METERING.name, digest, usage)
        settled = await until(lambda: self.ledger.settle(self.tenant, ask.job_id, ask.ingress, used_of(usage)))
        assert isinstance(settled, Settled)
        self.finished += 1

    async def watch(self) -> None:
        """At every sampled instant no more is held than may be."""
        while not self.over.is_set():
            with suppress(LedgerUnavailable):
                status = await self.ledger.status()
                assert status.tenants.get(self.tenant, 0) <= CONCURRENCY_MAX
            await asyncio.sleep(LOOK_S)


Lose = Callable[[RedisServer, Redis], Awaitable[None]]


async def flushed(_: RedisServer, admin: Redis) -> None:
    await admin.flushall()


async def killed(server: RedisServer, _: Redis) -> None:
    server.process.kill()
    await asyncio.to_thread(server.start)


@pytest.mark.parametrize("lose", [flushed, killed])
async def test_lost_five_times_under_load_it_is_closed_at_once_and_opened_again_as_the_log_says(
    kept: Stack, redis_server: RedisServer, lose: Lose
) -> None:
    said: list[str | None] = []
    async with AsyncExitStack() as opened:
        admin, publisher = connect(redis_server.redis("admin")), Publisher(kept.kafka("admin"), "load", SystemClock())
        ledger = Ledger(connect(redis_server.redis("admin")))
        for close in (admin.aclose, ledger.close, publisher.stop):
            opened.push_async_callback(close)
        await publisher.start()
        audit = AuditWriter(publisher, f"load-{next(_numbers)}")
        await audit.start()
        load = Load(ledger, publisher, audit)
        keeper = asyncio.create_task(Keeper(kept.kafka("admin"), admin, said.append).run())
        async with asyncio.TaskGroup() as tasks:
            for work in (load.watch, *[load.work] * CLIENTS):
                tasks.create_task(work())
            for number in range(1, LOSSES + 1):
                await finished(load, number * JOBS_BETWEEN)
                await lose(redis_server, admin)
            await finished(load, (LOSSES + 1) * JOBS_BETWEEN)
            load.over.set()
        keeper.cancel()
        assert said.count(REBUILDING) >= LOSSES
        assert await check(kept.kafka("admin"), admin) == []
        assert (await ledger.status()).leases == 0


async def finished(load: Load, jobs: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while load.finished < jobs:
            await asyncio.sleep(LOOK_S)


async def test_a_hundred_thousand_events_are_folded_within_the_time_that_admission_may_stay_closed(
    kept: Stack, redis_server: RedisServer, record_property: Callable[[str, object], None]
) -> None:
    await asyncio.to_thread(append_jobs, kept, EVENTS // 2)
    admin = connect(redis_server.redis("admin"))
    keeper, loop = Keeper(kept.kafka("admin"), admin, lambda _: None), asyncio.get_running_loop()
    began = loop.time()
    assert await keeper.look()
    took_s = loop.time() - began
    record_property("rebuild_s", took_s)
    print(f"folded {EVENTS} events in {took_s:.1f} s")
    status = await Ledger(admin).status()
    await admin.aclose()
    assert status.open
    assert status.spent["kept-many"].day > 0


def append_jobs(stack: Stack, jobs: int) -> None:
    """Jobs that were admitted and finished, by a client that is quick."""
    producer = Producer({**stack.kafka("admin").librdkafka(), "linger.ms": 20, "queue.buffering.max.messages": EVENTS})
    now_ms = SystemClock().now_ms()
    decision = make_decision("kept-many", expires_at_ms=now_ms + 600_000)
    for number in range(jobs):
        ask = make_admission(f"many-{number}", decision)
        admitted = make_admitted(ask, now_ms * 1000).numbered("many", number)
        for topic, record in ((AUDIT.name, admitted), (METERING.name, make_usage(ask))):
            producer.produce(topic, record.encode(), f"key-{number % 64}")
        producer.poll(0)
    assert producer.flush(WAIT_S) == 0
