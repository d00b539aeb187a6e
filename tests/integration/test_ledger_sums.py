"""What tenants have used, in Redis's own form: the same as the rows make, of whatever age they are."""

import random

from infra.redis import connect
from ledger.answers import Used
from ledger.keys import coordinates
from ledger.rebuild import Gate, miscounted
from ledger.rows import Row
from ledger.store import Ledger
from ledger.tokens import BUCKET_US
from tests.conftest import RedisServer
from tests.fakes_ledger import make_admission, make_decision, make_route

S = 1_000_000
# Within a minute, over the periods of a counter, over midnight, and of a clock that was ahead.
AGES_US = (-12 * S, -4 * S, 0, 3 * S, 20 * S, 58 * S, 70 * S, 400 * S, 550 * S, 3_000 * S, 90_000 * S)


async def test_rows_of_any_age_in_any_order_are_counted_as_the_fold_does(redis_server: RedisServer) -> None:
    async with connect(redis_server.redis("admin")) as admin:
        gate, dice = Gate(admin), random.Random(3)
        await gate.load()
        compared = 0
        while compared < 10:
            epoch = await gate.raise_epoch()
            await gate.clear(epoch)
            now_us = await gate.now_us()
            rows = {
                f"{tenant}/job-{n}": row(tenant, n, now_us, dice) for n in range(40) for tenant in ("acme", "globex")
            }
            for first in range(0, 40, 4):
                await gate.restore(epoch, list(rows.items())[first * 2 : first * 2 + 8])
            await gate.open(epoch)
            for member, stored in list(rows.items())[::3]:
                (tenant, job_id), used = member.split("/"), Used(completion_tokens=dice.randrange(9))
                await Ledger(admin).settle(tenant, job_id, coordinates(stored.ingress), used)
            live, status = await gate.rows(), await Ledger(admin).status()
            if await gate.now_us() // BUCKET_US == now_us // BUCKET_US:
                assert miscounted(status, live) == []
                assert any(spent.minute and spent.day and spent.counter for spent in status.spent.values())
                compared += 1


def row(tenant: str, number: int, now_us: int, dice: random.Random) -> Row:
    ask = make_admission(f"job-{number}", make_decision(tenant, expires_at_ms=now_us // 1000 + 600_000))
    return Row.of_route(make_route(ask, admitted_at_us=now_us - dice.choice(AGES_US), lift=dice.randrange(5)))
