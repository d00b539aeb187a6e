"""`switchyard usage` on a real Kafka: a tenant's own jobs, each once, committed ones only."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest
from click.testing import CliRunner

from infra.clock import SystemClock
from infra.kafka import clients
from infra.kafka.publisher import Publisher
from infra.launch.stack import Stack
from producers.cli.usage import usage
from producers.release.usage import TenantUsage, day_of
from producers.release.usage_log import UsageLog
from schemas.jobs import Outcome
from schemas.metering import UsageRecorded
from schemas.topics import DAY_MS, METERING, Role
from tests.factories import pointed
from tests.fakes_ledger import at, make_admission, make_decision, make_usage

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_names = count(1)


@asynccontextmanager
async def writing(stack: Stack, role: str) -> AsyncIterator[Publisher]:
    publisher = Publisher(stack.kafka(role), f"usage-{next(_names)}", SystemClock())
    await publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()


def used(tenant: str, adapter: str, outcome: Outcome = Outcome.COMPLETED) -> UsageRecorded:
    ask = make_admission(f"job-{next(_names)}", make_decision(tenant, adapter), ingress=at(f"jobs.{tenant}"))
    return make_usage(ask, outcome=outcome)


async def meter(stack: Stack, records: list[UsageRecorded]) -> None:
    async with writing(stack, Role.WORKER) as worker:
        await worker.send_all([worker.outgoing(METERING.name, r.identity.adapter, r) for r in records])


async def abort(stack: Stack, record: UsageRecorded) -> None:
    producer = clients.make_producer(stack.kafka(Role.WORKER), f"worker.usage-{next(_names)}")
    await clients.start(producer)
    await producer.begin_transaction()
    await producer.send_and_wait(METERING.name, record.encode(), key=record.identity.adapter.encode(), partition=0)
    await producer.abort_transaction()
    await clients.stop(producer)


async def said(stack: Stack, *arguments: str) -> str:
    """What the command prints. It runs an event loop of its own, hence a thread."""
    shell = CliRunner(env={"SWITCHYARD_HOME": str(stack.file.home)})
    found = await asyncio.to_thread(shell.invoke, usage, arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


async def test_a_tenant_sees_its_own_jobs_once_and_nobody_elses(stack: Stack) -> None:
    mine, other = f"used-{next(_names)}", f"used-{next(_names)}"
    support, legal = used(mine, "support"), used(mine, "legal", Outcome.FAILED)
    foreign = used(other, "theirs")
    await meter(stack, [support, foreign, support, legal, used(mine, "legal")])
    await abort(stack, used(mine, "support"))
    async with writing(stack, "admin") as admin:
        for tenant, alias in ((mine, "own-name"), (other, "their-name")):
            await admin.publish(*pointed(tenant, alias, support.identity.adapter))
    found = json.loads(await said(stack, "--tenant", mine, "--json"))
    assert (found["jobs"], found["prompt_tokens"], found["completion_tokens"]) == (3, 15, 21)
    assert (found["outcomes"]["completed"], found["outcomes"]["failed"]) == (2, 1)
    jobs = {row["adapter"]: (row["jobs"], row["aliases"]) for row in found["adapters"]}
    assert jobs == {support.identity.adapter: (1, ["own-name"]), legal.identity.adapter: (2, [])}
    assert [row["jobs"] for row in found["days"]] == [3]
    table = await said(stack, "--tenant", mine)
    assert support.identity.adapter in table
    assert "2 completed, 1 failed" in table
    for secret in (other, "their-name", foreign.identity.adapter, foreign.job_id):
        assert secret not in table
        assert secret not in json.dumps(found)


async def test_a_range_is_of_the_time_at_which_jobs_ended(stack: Stack) -> None:
    name = f"used-{next(_names)}"
    # A record is written after its job ended, hence times that are past.
    later = SystemClock().now_ms()
    earlier = later - DAY_MS
    ended = [used(name, "support").model_copy(update={"ended_at_ms": time_ms}) for time_ms in (earlier, later)]
    await meter(stack, ended)
    second = json.loads(await said(stack, "--tenant", name, "--since", day_of(later), "--json"))
    first = json.loads(await said(stack, "--tenant", name, "--until", day_of(later), "--json"))
    assert [row["day"] for row in second["days"]] == [day_of(later)]
    assert [row["day"] for row in first["days"]] == [day_of(earlier)]
    after = json.loads(await said(stack, "--tenant", name, "--since", day_of(later + DAY_MS), "--json"))
    assert (after["jobs"], after["days"]) == (0, [])


async def test_a_tenant_without_usage_and_an_unknown_one_are_answered_alike(
    stack: Stack, tenant: Callable[[], str]
) -> None:
    known, unknown = tenant(), "nobody-here"
    for form in ((), ("--json",)):
        answers = {name: await said(stack, "--tenant", name, *form) for name in (known, unknown)}
        assert answers[known].split() == answers[unknown].replace(unknown, known).split()
    assert json.loads(answers[unknown])["jobs"] == 0


async def test_progress_rises_and_says_percents_only(stack: Stack) -> None:
    name, shown = f"used-{next(_names)}", list[int]()
    await meter(stack, [used(name, "support") for _ in range(5)])
    counted = TenantUsage(name)
    await UsageLog(stack.kafka(Role.OPERATOR), shown.append).fold(counted)
    assert counted.total.jobs == 5
    assert shown == sorted(set(shown))
    assert 0 <= shown[0] <= shown[-1] <= 100
