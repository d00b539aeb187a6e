"""The settler process on a real Kafka and Redis, fed with usage as a worker commits it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from infra.clock import SystemClock
from infra.failpoints import VARIABLE
from infra.kafka import clients
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming, Outgoing
from infra.kafka.tail import Tail, read_range
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.redis import connect
from ledger.answers import Admission, Granted
from ledger.rebuild import Gate, rebuild
from ledger.store import Ledger
from schemas.audit import AUDIT_RECORDS, AuditRecord, Finished, WriterClosed
from schemas.metering import UsageRecorded
from schemas.record import decode_one_of
from schemas.topics import AUDIT, DLQ, DLQ_COMPONENT, DLQ_REASON, METERING, Role
from tests.fakes_ledger import at, make_admission, make_decision, make_usage

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

WAIT_S = 40.0
JOBS = 20
_names = count(1)


class Bench:
    """A tenant of the test's own: what was granted to it, and what became of that."""

    def __init__(self, stack: Stack, worker: Publisher, ledger: Ledger) -> None:
        self.stack = stack
        self.worker = worker
        self.ledger = ledger
        self.tenant = f"settled-{next(_names)}"
        self.audit: list[AuditRecord] = []

    def read(self, record: Incoming) -> None:
        """Keep what the audit gains."""
        self.audit.append(decode_one_of(AUDIT_RECORDS, record.value))

    async def admit(self, job_id: str) -> Admission:
        decision = make_decision(self.tenant, expires_at_ms=SystemClock().now_ms() + 600_000)
        ask = make_admission(job_id, decision, ingress=at(f"jobs.{self.tenant}"), concurrency_max=999, window_max=9999)
        assert isinstance(await self.ledger.admit(ask), Granted)
        return ask

    async def finish(self, jobs: int = JOBS) -> list[UsageRecorded]:
        """Admit jobs and commit their usage, over all partitions."""
        asks = [await self.admit(f"job-{next(_names)}") for _ in range(jobs)]
        usages = [make_usage(ask) for ask in asks]
        await self.worker.send_all(
            [self.worker.outgoing(METERING.name, u.identity.adapter, u, partition=n % 4) for n, u in enumerate(usages)]
        )
        return usages

    async def held(self) -> int:
        return (await self.ledger.status()).tenants.get(self.tenant, 0)

    def finished(self) -> list[Finished]:
        return [r for r in self.audit if isinstance(r, Finished) and r.identity.tenant == self.tenant]

    async def all_settled(self, jobs: int = JOBS) -> None:
        """Wait until this tenant holds nothing and each of its jobs has an outcome in the audit."""

        async def done() -> bool:
            return await self.held() == 0 and len({r.job_id for r in self.finished()}) == jobs

        await until(done)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.fixture
async def bench(stack: Stack) -> AsyncIterator[Bench]:
    admin = connect(stack.redis("admin"))
    await rebuild(stack.kafka(Role.OPERATOR), admin)
    worker = Publisher(stack.kafka(Role.WORKER), f"test-{next(_names)}", SystemClock())
    await worker.start()
    bench = Bench(stack, worker, Ledger(admin))
    audit = Tail(stack.kafka(Role.OPERATOR), [AUDIT.name], bench.read, SystemClock(), from_end=True)
    await audit.start()
    following = asyncio.create_task(audit.run())
    yield bench
    await audit.stop()
    following.cancel()
    await worker.stop()
    await admin.aclose()


@contextmanager
def settler(stack: Stack, failpoint: str = "") -> Iterator[Process]:
    process = stack.start(f"settler-{next(_names)}", Role.SETTLER, {VARIABLE: failpoint})
    try:
        yield process
    finally:
        process.stop()


async def exit_code(process: Process) -> int | None:
    return await asyncio.to_thread(process.wait_exit, WAIT_S)


async def test_committed_usage_ends_the_lease_and_becomes_the_outcome(bench: Bench) -> None:
    usages = {usage.job_id: usage for usage in await bench.finish()}
    with settler(bench.stack):
        await bench.all_settled()
    for record in bench.finished():
        usage = usages[record.job_id]
        assert (record.identity, record.outcome, record.usage) == (usage.identity, usage.outcome, usage.usage)
        assert (record.attempt, record.reply_hash, record.metering.topic) == (1, usage.reply_hash, METERING.name)


async def test_usage_of_an_aborted_transaction_is_no_outcome(bench: Bench) -> None:
    ask = await bench.admit("aborted")
    producer = clients.make_producer(bench.stack.kafka(Role.WORKER), f"worker.test-{next(_names)}")
    await clients.start(producer)
    await producer.begin_transaction()
    await producer.send_and_wait(METERING.name, make_usage(ask).encode(), key=b"key", partition=0)
    await producer.abort_transaction()
    await clients.stop(producer)
    with settler(bench.stack):
        usages = await bench.finish(4)
        await until(lambda: settled(bench, usages))
    assert await bench.held() == 1
    assert "aborted" not in {record.job_id for record in bench.finished()}


async def settled(bench: Bench, usages: list[UsageRecorded]) -> bool:
    return {usage.job_id for usage in usages} <= {record.job_id for record in bench.finished()}


@pytest.mark.parametrize("step", ["settler.taken", "settler.settled", "settler.finished"])
async def test_a_settler_killed_between_two_steps_leaves_a_right_sum(bench: Bench, step: str) -> None:
    with settler(bench.stack):
        await bench.finish(4)
        await bench.all_settled(4)
    with settler(bench.stack, step) as process:
        usages = await bench.finish()
        await bench.admit("unfinished")
        assert await exit_code(process) == -signal.SIGKILL
    with settler(bench.stack):
        await until(lambda: settled(bench, usages))
        await until(lambda: holds(bench, 1))
    outcomes = {(record.job_id, record.outcome, record.metering) for record in bench.finished()}
    assert len(outcomes) == JOBS + 4


async def holds(bench: Bench, jobs: int) -> bool:
    return await bench.held() == jobs


async def test_unreadable_usage_is_a_dead_letter_and_odd_headers_are_not(bench: Bench) -> None:
    ask = await bench.admit("odd")
    odd = bench.worker.outgoing(METERING.name, "key", make_usage(ask), partition=0)
    odd = replace(odd, headers=(("ce_type", b"\xff\xfe"), *odd.headers))
    broken = Outgoing(topic=METERING.name, key=b"key", value=f"{bench.tenant}: no JSON".encode(), partition=0)
    await bench.worker.send_all([broken, odd])
    with settler(bench.stack):
        await bench.all_settled(1)
    operator = bench.stack.kafka(Role.OPERATOR)
    letters = [record async for record in read_range(operator, DLQ.name, 0) if record.value == broken.value]
    headers = dict(letters[0].headers)
    assert (headers[DLQ_COMPONENT], headers[DLQ_REASON]) == (b"settler", b"invalid_record")


async def test_a_settler_waits_for_a_closed_ledger_and_says_so(bench: Bench) -> None:
    with settler(bench.stack) as process:
        await bench.finish()
        await bench.all_settled()
        admin = connect(bench.stack.redis("admin"))
        usage = make_usage(await bench.admit("late"))
        await Gate(admin).raise_epoch()
        await bench.worker.publish(METERING.name, usage.identity.adapter, usage)
        await until(lambda: ready(process, 503))
        await rebuild(bench.stack.kafka(Role.OPERATOR), admin)
        await bench.all_settled(JOBS + 1)
        await until(lambda: ready(process, 200))
        await admin.aclose()


async def ready(process: Process, status: int) -> bool:
    def asked() -> int:
        try:
            with urlopen(f"http://127.0.0.1:{process.running.metrics_port}/ready", timeout=5) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    return await asyncio.to_thread(asked) == status


async def test_a_settler_that_is_told_to_stop_ends_its_batch_and_signs_off(bench: Bench) -> None:
    with settler(bench.stack) as process:
        await bench.finish()
        await bench.all_settled()
        process.signal(signal.SIGTERM)
        assert await exit_code(process) == 0
    await until(lambda: signed_off(bench))


async def signed_off(bench: Bench) -> bool:
    writers = {record.writer for record in bench.finished()}
    return writers <= {record.writer for record in bench.audit if isinstance(record, WriterClosed)}
