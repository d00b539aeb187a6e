"""The ledger made anew from a real log, after what a real Redis can suffer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count

import pytest
from click.testing import CliRunner
from redis.exceptions import BusyLoadingError

from infra.clock import SystemClock
from infra.kafka.publisher import AuditWriter, Publisher
from infra.launch.plan import REPOSITORY
from infra.launch.stack import Stack
from infra.redis import Client, connect
from ledger.answers import (
    Admission,
    Begun,
    BegunCancelled,
    Closed,
    Elsewhere,
    Ended,
    Flagged,
    Granted,
    Refused,
    TakenBack,
)
from ledger.cli import ledger as command
from ledger.fold import used_of
from ledger.functions.calls import call
from ledger.rebuild import check, rebuild
from ledger.store import Ledger, LedgerUnavailable
from schemas.audit import CancelRequested, Rejected, Started
from schemas.jobs import JobClass
from schemas.metering import UsageRecorded
from schemas.record import Coordinates
from schemas.topics import METERING, Role
from tests.conftest import RedisServer
from tests.fakes_ledger import at, make_admission, make_admitted, make_decision, make_refusal, make_started, make_usage

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_names = count(1)
ENDINGS = 300


class System:
    """Router, worker and settler in a few lines, on a real log and a Redis of the test's own."""

    def __init__(self, stack: Stack, redis: Client, publisher: Publisher, audit: AuditWriter) -> None:
        self.redis = redis
        self.ledger = Ledger(redis)
        self.kafka = stack.kafka(Role.OPERATOR)
        self.tenant = f"rebuilt-{next(_names)}"
        self.publisher = publisher
        self.audit = audit

    def ask(self, job_id: str) -> Admission:
        decision = make_decision(self.tenant, job_class=JobClass.BATCH, expires_at_ms=SystemClock().now_ms() + 600_000)
        return make_admission(
            job_id, decision, ingress=at(f"batch.{self.tenant}"), concurrency_max=9999, window_max=9999
        )

    async def admit(self, ask: Admission) -> Granted:
        answer = await self.ledger.admit(ask)
        assert isinstance(answer, Granted)
        record = make_admitted(ask, answer.admitted_at_us, answer.epoch, answer.lift)
        await self.audit.append(ask.decision.identity.adapter, record)
        return answer

    async def begin(self, ask: Admission, request: Coordinates) -> Begun:
        answer = await self.ledger.begin(self.tenant, ask.job_id, request, "7.0")
        assert isinstance(answer, Begun)
        started: Started = make_started(ask, answer.attempt, request)
        await self.audit.append(ask.decision.identity.adapter, started)
        return answer

    async def cancel(self, job_id: str) -> None:
        answer = await self.ledger.cancel(self.tenant, job_id)
        identity = answer.decision.identity if isinstance(answer, Flagged) else None
        record = CancelRequested(tenant=self.tenant, job_id=job_id, identity=identity, ingress=at("cancel"))
        await self.audit.append(identity.adapter if identity else f"tenant/{self.tenant}", record)

    async def refuse(self, job_id: str) -> None:
        refusal = replace(make_refusal(job_id), tenant=self.tenant)
        answer = await self.ledger.refuse(refusal)
        assert isinstance(answer, Refused)
        record = Rejected(
            tenant=self.tenant, job_id=job_id, body_hash=refusal.body_hash, ingress=refusal.ingress,
            reason=refusal.reason,
        )  # fmt: skip
        await self.audit.append(f"tenant/{self.tenant}", record)

    async def finish(self, ask: Admission) -> None:
        usage: UsageRecorded = make_usage(ask)
        await self.publisher.publish(METERING.name, usage.identity.adapter, usage)
        await self.ledger.settle(self.tenant, ask.job_id, ask.ingress, used_of(usage))


@pytest.fixture
async def system(stack: Stack, redis_server: RedisServer) -> AsyncIterator[System]:
    redis = connect(redis_server.redis("admin"))
    publisher = Publisher(stack.kafka("admin"), f"rebuild-{next(_names)}", SystemClock())
    await publisher.start()
    audit = AuditWriter(publisher, f"rebuild-{next(_names)}")
    await audit.start()
    system = System(stack, redis, publisher, audit)
    await rebuild(system.kafka, redis)
    yield system
    await publisher.stop()
    await redis.aclose()


async def test_what_was_decided_before_a_loss_is_decided_after_it(system: System) -> None:
    asks = {name: system.ask(name) for name in ("waiting", "begun", "cancelled", "finished")}
    granted = {name: await system.admit(ask) for name, ask in asks.items()}
    request = at("requests.main")
    await system.begin(asks["begun"], request)
    await system.cancel("cancelled")
    await system.cancel("not-here-yet")
    await system.refuse("refused")
    await system.finish(asks["finished"])
    before = await system.ledger.status()
    await system.redis.flushall()
    assert await system.ledger.admit(asks["waiting"]) == Closed()
    await rebuild(system.kafka, system.redis)

    for name, ask in asks.items():
        assert await system.ledger.admit(ask) == replace(granted[name], repeated=True)
    after = await system.ledger.status()
    assert after.tenants[system.tenant] == before.tenants[system.tenant] == 3
    assert after.epoch > before.epoch
    assert await system.ledger.admit(system.ask("not-here-yet")) == TakenBack()
    assert isinstance(await system.ledger.admit(system.ask("refused")), Refused)
    begin = system.ledger.begin
    assert await begin(system.tenant, "begun", at("requests.main"), "7.1") == Elsewhere(request=request)
    assert isinstance(await begin(system.tenant, "cancelled", at("requests.main"), "7.1"), BegunCancelled)
    assert await begin(system.tenant, "finished", at("requests.main"), "7.1") == Ended()


async def test_attempts_go_on_rising_after_a_loss(system: System) -> None:
    ask, request = system.ask("job-1"), at("requests.main")
    await system.admit(ask)
    await system.begin(ask, request)
    lost = await system.ledger.begin(system.tenant, "job-1", request, "7.0")
    assert isinstance(lost, Begun)
    await system.redis.flushall()
    await rebuild(system.kafka, system.redis)
    again = await system.ledger.begin(system.tenant, "job-1", request, "7.0")
    assert isinstance(again, Begun)
    assert again.attempt > lost.attempt


async def test_a_killed_redis_that_kept_its_data_is_rebuilt_all_the_same(
    system: System, redis_server: RedisServer
) -> None:
    ask = system.ask("job-1")
    await system.admit(ask)
    redis_server.process.kill()
    with pytest.raises(LedgerUnavailable):
        await system.ledger.status()
    redis_server.start()
    await loaded(system.redis)
    assert not (await system.ledger.status()).open
    await rebuild(system.kafka, system.redis)
    assert isinstance(await system.ledger.admit(ask), Granted)
    assert await check(system.kafka, system.redis) == []


async def loaded(redis: Client) -> None:
    """Wait until a Redis that was started again has read its own file back: it takes connections before that."""
    async with asyncio.timeout(10):
        while True:
            try:
                await redis.ping()
                return
            except BusyLoadingError:
                await asyncio.sleep(0.01)


async def test_the_check_finds_nothing_at_rest_and_names_what_was_tampered_with(system: System) -> None:
    for number in range(30):
        await system.admit(system.ask(f"job-{number}"))
    finished = system.ask("finished")
    await system.admit(finished)
    await system.finish(finished)
    assert await check(system.kafka, system.redis) == []
    await system.redis.hset(f"{{switchyard}}:job:{system.tenant}/job-7", "body", "another")
    await system.redis.hincrby("{switchyard}:counts", f"t|{system.tenant}", 1)
    body, tenants = await check(system.kafka, system.redis)
    assert f"job {system.tenant}/job-7: body is 'another'" in body
    assert tenants.startswith("tenants:")


async def test_leases_that_end_while_the_check_looks_are_no_difference(system: System) -> None:
    """One every few milliseconds: some end between any two questions that a check asks."""
    ends_ms = first_ms = SystemClock().now_ms() + 2_000
    for number in range(ENDINGS):
        ends_ms = first_ms + number * 5
        decision = make_decision(system.tenant, job_class=JobClass.BATCH, expires_at_ms=ends_ms)
        await system.admit(make_admission(f"job-{number}", decision, concurrency_max=9999, window_max=9999, grace_ms=0))
    while SystemClock().now_ms() < ends_ms:
        assert await check(system.kafka, system.redis) == []


async def test_an_epoch_that_only_the_log_knows_is_never_given_again(system: System) -> None:
    ask = system.ask("job-1")
    await system.audit.append(
        ask.decision.identity.adapter, make_admitted(ask, SystemClock().now_ms() * 1000, epoch=5000)
    )
    await system.redis.flushall()
    assert (await rebuild(system.kafka, system.redis)).epoch == 5001
    await call(system.redis, "raise", "", 0, 0)


async def test_a_launcher_opens_the_ledger_again_and_again(stack: Stack) -> None:
    variables = {**stack.kafka(Role.OPERATOR).environment(), **stack.redis("admin").environment()}
    epochs = []
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            str(REPOSITORY / ".venv/bin/python"), "-m", "ledger.rebuild",
            env=variables, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0
        assert said.startswith(b"ledger open: epoch ")
        epochs.append(int(said.split()[3].rstrip(b",")))
    assert epochs[1] == epochs[0] + 1


async def test_the_command_line_rebuilds_shows_and_checks(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(stack.file.home))

    async def say(*arguments: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, command, list(arguments))
        return result.exit_code, result.output

    code, output = await say("rebuild")
    assert (code, output.startswith("ledger open: epoch")) == (0, True)
    code, output = await say("status")
    assert (code, "ledger open" in output) == (0, True)
    assert await say("rebuild", "--check") == (0, "the ledger is what the log says\n")
