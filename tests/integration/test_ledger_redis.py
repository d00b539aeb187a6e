"""The ledger on a real Redis: what only a server can do to it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from infra.redis import Client, connect
from infra.settings import RedisSettings
from ledger.answers import AdmitAnswer, BeginAnswer, Begun, CancelAnswer, Closed, Granted, SettleAnswer, Settled
from ledger.functions import calls
from ledger.functions.calls import call
from ledger.rebuild import Gate
from ledger.rows import Row
from ledger.store import Ledger, LedgerUnavailable
from schemas.jobs import JobClass
from tests.conftest import RedisServer
from tests.fakes_ledger import USED, MemoryLedger, at, make_admission, make_decision, make_refusal, make_route

ACL = json.loads(Path(calls.__file__).with_name("acl.json").read_text())
REQUEST = at("requests.main", 5)
INGRESS = at("jobs.acme", 5)
# Commands of the connection itself, which Redis takes from anybody.
ANYBODYS = {"auth", "hello", "quit", "reset"}
FAR_MS = 1 << 42


@pytest.fixture
async def admin(redis_server: RedisServer) -> AsyncIterator[Client]:
    client = connect(redis_server.redis("admin"))
    await reopen(client)
    yield client
    await client.aclose()


async def reopen(admin: Client) -> None:
    gate = Gate(admin)
    await gate.load()
    await gate.open(await gate.raise_epoch())


async def soon(admin: Client) -> int:
    seconds, _ = await admin.time()
    return int(seconds) * 1000 + 60_000


async def test_a_redis_that_was_killed_and_came_back_with_its_data_admits_nothing(
    admin: Client, redis_server: RedisServer
) -> None:
    ledger = Ledger(admin)
    ask = make_admission(decision=make_decision(expires_at_ms=await soon(admin)))
    assert isinstance(await ledger.admit(ask), Granted)
    redis_server.process.kill()
    with pytest.raises(LedgerUnavailable):
        await ledger.admit(ask)
    redis_server.start()
    assert await ledger.admit(ask) == Closed()
    assert not (await ledger.status()).open
    await reopen(admin)
    assert isinstance(await ledger.admit(ask), Granted)


@pytest.mark.parametrize("loss", ["FLUSHALL", "FUNCTION FLUSH"])
async def test_an_emptied_redis_is_closed(admin: Client, loss: str) -> None:
    await admin.execute_command(*loss.split())  # type: ignore[no-untyped-call]
    ask = make_admission(decision=make_decision(expires_at_ms=await soon(admin)))
    assert await Ledger(admin).admit(ask) == Closed()
    assert not (await Ledger(admin).status()).open


async def test_two_rebuilds_at_once_cannot_open_each_others_ledger(admin: Client) -> None:
    gate = Gate(admin)
    first, second = await gate.raise_epoch(), await gate.raise_epoch()
    assert second == first + 1
    assert (await call(admin, "open", "", first))[0] == b"closed"
    assert (await call(admin, "restore", "", first))[0] == b"closed"
    await gate.open(second)
    assert (await Ledger(admin).status()).epoch == second


async def test_rows_come_back_as_they_were_stored(admin: Client) -> None:
    gate, expires_at_ms = Gate(admin), await soon(admin)
    asks = [make_admission(f"job-{n}", make_decision(expires_at_ms=expires_at_ms)) for n in range(450)]
    now_us = await gate.now_us()
    rows = {f"acme/{ask.job_id}": replace(Row.of_route(make_route(ask, now_us)), attempt=3) for ask in asks}
    epoch = await gate.raise_epoch()
    await gate.clear(epoch)
    await gate.restore(epoch, rows.items())
    await gate.open(epoch)
    assert await gate.rows() == rows
    assert (await Ledger(admin).status()).tenants == {"acme": 450}
    epoch = await gate.raise_epoch()
    await gate.clear(epoch)
    assert await admin.dbsize() == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"body_hash": ""}, "body hash"),
        ({"concurrency_max": -1}, "concurrency_max"),
        ({"window_max": 2**53}, "window_max"),
        ({"job_id": "x" * 300}, "job"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"tokens_per_day": 2**53}, "tokens_per_day"),
        ({"adapter_concurrency_max": -1}, "adapter_concurrency_max"),
        ({"grace_ms": 2**53 - 1}, "expires_ms"),
    ],
)
async def test_a_wrong_argument_is_refused_before_anything_is_written(
    admin: Client, change: dict[str, object], named: str
) -> None:
    ask = make_admission(decision=make_decision(expires_at_ms=await soon(admin)))
    with pytest.raises(LedgerUnavailable, match=named):
        await Ledger(admin).admit(replace(ask, **change))  # type: ignore[arg-type]
    assert await admin.dbsize() == 1


@pytest.mark.parametrize("role", sorted(ACL["users"]))
async def test_each_user_does_its_own_work_and_no_other_command(
    admin: Client, redis_server: RedisServer, role: str
) -> None:
    rights = ACL["users"][role]
    await admin.execute_command("ACL", "SETUSER", role, "reset", "on", ">secret", *ACL["keys"], *rights)  # type: ignore[no-untyped-call]
    settings = redis_server.redis("admin").model_copy(update={"username": role, "password": "secret"})
    user = connect(settings)
    allowed = {right.removeprefix("+") for right in rights}
    assert await taken(user, await every_command(admin)) == allowed
    await lapse(Ledger(admin), await soon(admin))
    await Ledger(admin).admit(
        make_admission("to-settle", make_decision(expires_at_ms=await soon(admin)), ingress=INGRESS)
    )
    await WORK[role](Ledger(user), await soon(admin))
    await user.aclose()


async def every_command(admin: Client) -> dict[str, int]:
    """Every command and subcommand of this server with the least number of words it takes."""
    admin.response_callbacks.pop("COMMAND", None)  # it cannot read the answer to COMMAND LIST
    names: list[bytes] = await admin.execute_command("COMMAND", "LIST")  # type: ignore[no-untyped-call]
    names += await admin.execute_command("COMMAND", "LIST", "FILTERBY", "PATTERN", "*|*")  # type: ignore[no-untyped-call]
    facts: list[list[int]] = await admin.execute_command("COMMAND", "INFO", *names)  # type: ignore[no-untyped-call]
    found = {name.decode(): abs(fact[1]) for name, fact in zip(names, facts, strict=True)}
    containers = {name.partition("|")[0] for name in found if "|" in name}
    return {name: words for name, words in found.items() if name not in containers | ANYBODYS}


async def taken(user: Client, commands: dict[str, int]) -> set[str]:
    """The commands that Redis takes from this user."""
    found = set()
    for name, words in commands.items():
        command = name.split("|")
        try:
            await user.execute_command(*command, *["{switchyard}:none"] * (words - len(command)))  # type: ignore[no-untyped-call]
        except NoPermissionError:
            continue
        except ResponseError as error:
            # EXEC wraps the refusal; DEBUG and MODULE are off for everybody.
            if "NOPERM" in str(error) or "command not allowed" in str(error):
                continue
        found.add(name)
    return found


async def lapse(ledger: Ledger, now_ms: int) -> None:
    """Leave a lease whose time is over: whoever looks next ends it, and gives its tokens back."""
    ask = make_admission("lapsed", make_decision("globex", expires_at_ms=now_ms - 600_000))
    assert await ledger.adopt(make_route(ask, admitted_at_us=(now_ms - 70_000) * 1000, lift=5))


async def router_work(ledger: Ledger, expires_at_ms: int) -> None:
    asks = [
        make_admission(f"of-router-{job_class}", make_decision(job_class=job_class, expires_at_ms=expires_at_ms))
        for job_class in JobClass
    ]
    for ask in asks:
        await ledger.admit(replace(ask, window_max=0))
        await ledger.admit(replace(ask, ingress=at()))
        await ledger.cancel("acme", ask.job_id)
    await ledger.cancel("acme", "not-here-yet")
    await ledger.refuse(make_refusal("refused"))
    await ledger.admit(make_admission(decision=make_decision("initech", expires_at_ms=expires_at_ms), window_max=2))
    await ledger.admit(make_admission(decision=make_decision("globex", expires_at_ms=expires_at_ms), window_max=2))
    await ledger.status()
    await ledger.fairness()


async def worker_work(ledger: Ledger, expires_at_ms: int) -> None:
    ask = make_admission("of-worker", make_decision(expires_at_ms=expires_at_ms))
    await ledger.begin("acme", "unheard-of", REQUEST, "7.0")
    await ledger.adopt(make_route(ask, admitted_at_us=expires_at_ms * 1000 - 60_000_000))
    begun = await ledger.begin("acme", "of-worker", REQUEST, "7.0")
    assert isinstance(begun, Begun)
    assert await ledger.hand_over("acme", "of-worker", REQUEST, begun.attempt)


async def settler_work(ledger: Ledger, _: int) -> None:
    for job_id in ("to-settle", "unknown"):
        assert await ledger.settle("acme", job_id, INGRESS, USED) == Settled(repeated=False)


async def release_work(ledger: Ledger, _: int) -> None:
    await ledger.references(make_decision().identity.adapter)


async def operator_work(ledger: Ledger, _: int) -> None:
    gate = Gate(ledger._redis)
    await gate.load()
    epoch = await gate.raise_epoch()
    await gate.clear(epoch)
    row = Row.of_route(make_route(make_admission(decision=make_decision(expires_at_ms=FAR_MS))))
    await gate.restore(epoch, [("acme/job-1", row)])
    await gate.open(epoch)
    await gate.rows()
    await ledger.status()


WORK = {
    "router": router_work,
    "worker": worker_work,
    "settler": settler_work,
    "release": release_work,
    "operator": operator_work,
}


async def test_a_call_without_an_answer_is_sent_once() -> None:
    sent: list[bytes] = []

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            sent.append(data)
            if b"FCALL" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = connect(RedisSettings(url=f"redis://127.0.0.1:{port}/0?protocol=2", username="router", password="x"))
    with pytest.raises(LedgerUnavailable):
        await Ledger(client).cancel("acme", "job-1")
    assert sum(data.count(b"FCALL") for data in sent) == 1
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_cancelled_calls_never_hand_their_answer_to_another(admin: Client) -> None:
    ledger, expires_at_ms = Ledger(admin), await soon(admin)
    decision, numbers, dice = make_decision(expires_at_ms=expires_at_ms), count(), random.Random(7)

    async def one() -> None:
        ask = make_admission(f"job-{next(numbers)}", decision, concurrency_max=100_000, window_max=100_000)
        answer = await ledger.admit(ask)
        assert isinstance(answer, Granted)
        assert answer.ingress == ask.ingress

    for _ in range(40):
        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(dice.random() / 100)
        for task in dice.sample(tasks, 8):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)


Answer = AdmitAnswer | BeginAnswer | CancelAnswer | SettleAnswer | bool


async def test_the_fold_and_redis_answer_the_same_to_any_sequence_of_calls(admin: Client) -> None:
    dice, fold, redis = random.Random(11), MemoryLedger(), Ledger(admin)
    fold.now_us = await Gate(admin).now_us()
    fold.books.epoch = 0
    fold.reopen()
    expires_at_ms = fold.now_us // 1000 + 3_600_000
    for _ in range(1500):
        state = dice.getstate()
        expected = await step(fold, dice, expires_at_ms)
        dice.setstate(state)
        assert timeless(await step(redis, dice, expires_at_ms)) == timeless(expected)
    live = await Gate(admin).rows()
    assert {member: replace(row, admitted_us=0) for member, row in live.items()} == {
        member: replace(row, admitted_us=0) for member, row in fold.books.rows.items()
    }
    assert await redis.status() == await fold.status()


async def step(ledger: Ledger, dice: random.Random, expires_at_ms: int) -> Answer:
    """One call, chosen by the dice."""
    tenant, job_id = dice.choice(["acme", "globex"]), f"job-{dice.randrange(12)}"
    place, attempt, fence = at("requests.main", dice.randrange(2)), dice.randrange(1, 4), f"7.{dice.randrange(3)}"
    ingress, body = at(f"jobs.{tenant}", dice.randrange(3)), dice.choice(["body", "body", "other"])
    job_class, partition = dice.choice(list(JobClass)), dice.randrange(2)
    decision = make_decision(tenant, job_class=job_class, partition=partition, expires_at_ms=expires_at_ms)
    match dice.randrange(8):
        case 0 | 1:
            ask = make_admission(job_id, decision, body, ingress, concurrency_max=5, window_max=4)
            return await ledger.admit(ask)
        case 2:
            return await ledger.refuse(replace(make_refusal(job_id, body), tenant=tenant, ingress=ingress))
        case 3:
            return await ledger.cancel(tenant, job_id)
        case 4 | 5:
            return await ledger.begin(tenant, job_id, place, fence)
        case 6:
            return await ledger.hand_over(tenant, job_id, place, attempt)
    return await ledger.settle(tenant, job_id, ingress, USED)


def timeless(answer: Answer) -> Answer:
    """Without what the two clocks make differ."""
    if isinstance(answer, Granted):
        return replace(answer, admitted_at_us=0)
    return replace(answer, remaining_ms=0) if isinstance(answer, Begun) else answer
