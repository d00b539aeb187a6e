"""Whose turn it is: Client looks at nobody where it need not, and answers as the fold, which looks at everybody."""

import random
from dataclasses import replace

from infra.redis import Client, connect
from ledger.answers import AdmitAnswer, Full, Granted, Used
from ledger.fairness import PERIOD_US, WAITING_US
from ledger.rebuild import Gate
from ledger.store import Ledger
from schemas.jobs import JobClass, Limits
from tests.conftest import RedisServer
from tests.fakes_ledger import MemoryLedger, at, make_admission, make_decision

ROUNDS, CALLS = 12, 120
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")


async def test_the_fold_and_redis_choose_the_same_tenant(redis_server: RedisServer) -> None:
    async with connect(redis_server.redis("admin")) as admin:
        compared, seed, kinds = 0, 0, set[str]()
        while compared < ROUNDS:
            seed += 1
            assert seed < 5 * ROUNDS, "no round was short enough to compare"
            fold, redis = MemoryLedger(), Ledger(admin)
            began_us = fold.now_us = await reopened(admin)
            live = await turns(redis, random.Random(seed), began_us // 1000 + 600_000)
            ended_us = await Gate(admin).now_us()
            # The fold's time stands: what ends by time, or is halved by it, must not have done so meanwhile.
            if ended_us - began_us < WAITING_US and ended_us // PERIOD_US == began_us // PERIOD_US:
                assert await turns(fold, random.Random(seed), began_us // 1000 + 600_000) == live
                compared += 1
                kinds |= set(live)
        assert kinds >= {"granted", "window", "share"}


async def reopened(admin: Client) -> int:
    """An empty ledger; the time of it."""
    gate = Gate(admin)
    await gate.load()
    epoch = await gate.raise_epoch()
    await gate.clear(epoch)
    await gate.open(epoch)
    return await gate.now_us()


async def turns(ledger: Ledger, dice: random.Random, expires_at_ms: int) -> list[str]:
    """Tenants that ask for places of two small windows, and give some back."""
    window_max, weights = dice.choice([4, 7, 17]), {tenant: dice.choice([50, 100, 300]) for tenant in TENANTS}
    reserved = dice.choice([{}, {"hooli": 3}, {"acme": 2, "nobody": 4}])
    eager = dice.choice([1, 6])
    running, words = [], []
    for number in range(CALLS):
        tenant = dice.choices(TENANTS, [eager, 1, 1, 1, 1])[0]
        decision = make_decision(
            tenant, job_class=JobClass.BATCH, partition=dice.randrange(2), expires_at_ms=expires_at_ms
        ).model_copy(
            update={"weight": weights[tenant], "limits": Limits(tokens_max=dice.randrange(1, 99), context_max=1024)}
        )
        limits = {"concurrency_max": 1000, "window_max": window_max}
        ask = replace(make_admission(f"job-{number}", decision, **limits, ingress=at()), reserved=reserved)  # type: ignore[arg-type]
        answer = await ledger.admit(ask)
        words.append(word(answer))
        if isinstance(answer, Granted):
            running.append(ask)
        if running and dice.random() < 0.4:
            over = running.pop(dice.randrange(len(running)))
            used = Used(prompt_tokens=1, completion_tokens=dice.randrange(over.decision.limits.tokens_max))
            await ledger.settle(over.tenant, over.job_id, over.ingress, used)
    return words


def word(answer: AdmitAnswer) -> str:
    if isinstance(answer, Full):
        return answer.resource.value
    assert isinstance(answer, Granted)
    return "granted" if not answer.lift else f"granted, lifted by {answer.lift}"
