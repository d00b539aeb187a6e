"""What rows of jobs come to: leases, tokens of a minute and a day, counters. Pure; nothing here can drift."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.answers import SWEEP_MAX, Spent
from ledger.fairness import ACTIVE_US, counter, period_of
from ledger.rows import Row
from ledger.tokens import bucket_of, day_of, in_minute


def tenant_of(member: str) -> str:
    """The tenant of `<tenant>/<job id>`."""
    return member.partition("/")[0]


@dataclass
class Holdings:
    """Rows by `<tenant>/<job id>`, and every sum that the ledger keeps, made from them."""

    rows: dict[str, Row] = field(default_factory=dict)

    def spent(self, tenant: str, now_us: int) -> Spent:
        minute = in_minute(self.sums(tenant, bucket_of, "tokens"), now_us)
        day = self.sums(tenant, day_of, "tokens").get(day_of(now_us), 0)
        return Spent(minute=sum(minute.values()), day=day, counter=self.counter(tenant, now_us))

    def held(self) -> dict[str, Row]:
        return {member: row for member, row in self.rows.items() if row.held}

    def of(self, tenant: str) -> list[Row]:
        return [row for member, row in self.rows.items() if tenant_of(member) == tenant]

    def sums(self, tenant: str, unit_of: Callable[[int], int], name: str) -> Counter[int]:
        """Tokens or costs of a tenant's jobs, by the unit of time of their admission."""
        sums: Counter[int] = Counter()
        for row in self.of(tenant):
            if row.admitted_us:
                sums[unit_of(row.admitted_us)] += getattr(row, name)
        return sums

    def counter(self, tenant: str, now_us: int) -> int:
        return counter(self.sums(tenant, period_of, "cost"), now_us)

    def recent(self, since_us: int) -> list[str]:
        """Tenants whose last admission is that young."""
        return sorted({tenant_of(member) for member, row in self.rows.items() if row.admitted_us > since_us})

    def lift(self, tenant: str, now_us: int) -> int:
        """What a tenant that comes back is behind the lowest of the others: no credit is banked."""
        active = self.recent(now_us - ACTIVE_US)
        if tenant in active or any(row.held for row in self.of(tenant)):
            return 0
        lowest = min((self.counter(other, now_us) for other in active), default=0)
        return max(0, lowest - self.counter(tenant, now_us))

    def sweep(self, now_us: int) -> None:
        over = sorted((row.lease_us, member) for member, row in self.held().items() if row.lease_us <= now_us)
        for _, member in over[:SWEEP_MAX]:
            self.rows[member] = self.rows[member].released()
