"""What an admission is measured against: the tenant's own limits, and whose turn it is in the window. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from ledger.answers import RETRY_AFTER_MS, Admission, Full, Resource
from ledger.fairness import SEEN_US, WAITING_US, Claim, room, shares
from ledger.holdings import Holdings, tenant_of
from ledger.keys import window_of
from ledger.tokens import bucket_of, day_of, day_wait_ms, minute_wait_ms


@dataclass
class Places(Holdings):
    """Holdings, and who asked for places lately."""

    #: By window: when each tenant last asked for a place and with which weight; until when one is waited for.
    seen: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    waiting: dict[str, dict[str, int]] = field(default_factory=dict)

    def full(self, ask: Admission, now_us: int) -> Full | None:
        """The tenant's own limits first; only one that is within them takes part in the choice of who is next."""
        limit = self._at_own_limit(ask, now_us)
        if limit is not None or not ask.window_max:
            return limit or Full(resource=Resource.WINDOW, retry_after_ms=RETRY_AFTER_MS)
        window = window_of(ask.decision.pool, ask.decision.partition)
        self.seen.setdefault(window, {})[ask.tenant] = (now_us, ask.decision.weight)
        waiting = self.waiting.setdefault(window, {})
        resource = self._no_place(ask, window, now_us)
        if resource is None:
            waiting.pop(ask.tenant, None)
            return None
        waiting[ask.tenant] = now_us + WAITING_US
        return Full(resource=resource, retry_after_ms=RETRY_AFTER_MS)

    def _at_own_limit(self, ask: Admission, now_us: int) -> Full | None:
        held = [row for row in self.of(ask.tenant) if row.held]
        if len(held) >= ask.concurrency_max:
            return Full(resource=Resource.TENANT, retry_after_ms=RETRY_AFTER_MS)
        if sum(row.digest == ask.decision.identity.adapter for row in held) >= ask.adapter_concurrency_max:
            return Full(resource=Resource.ADAPTER, retry_after_ms=RETRY_AFTER_MS)
        reserve = ask.decision.reserve
        spent = self.sums(ask.tenant, day_of, "tokens").get(day_of(now_us), 0)
        wait_ms = day_wait_ms(spent, reserve, ask.tokens_per_day, now_us)
        if wait_ms:
            return Full(resource=Resource.BUDGET, retry_after_ms=wait_ms)
        wait_ms = minute_wait_ms(self.sums(ask.tenant, bucket_of, "tokens"), reserve, ask.tokens_per_minute, now_us)
        return Full(resource=Resource.RATE, retry_after_ms=wait_ms) if wait_ms else None

    def _no_place(self, ask: Admission, window: str, now_us: int) -> Resource | None:
        held = Counter(tenant_of(member) for member, row in self.held().items() if row.window == window)
        claims = self._claims(ask, window, held, now_us)
        total = held.total()
        if total >= ask.window_max:
            return Resource.WINDOW
        places, within = room(ask.tenant, ask.window_max, total, claims)
        owed, mine = shares(ask.window_max, claims), self.counter(ask.tenant, now_us)
        before = sum(
            until_us > now_us
            and other != ask.tenant
            and other in claims
            and (claims[other].held < owed[other]) == within
            and self.counter(other, now_us) < mine
            for other, until_us in self.waiting[window].items()
        )
        if places > before:
            return None
        return Resource.WINDOW if within else Resource.SHARE

    def _claims(self, ask: Admission, window: str, held: Counter[str], now_us: int) -> dict[str, Claim]:
        """Of every tenant that asked for a place here lately, or for which some are reserved."""
        active = {other: weight for other, (at_us, weight) in self.seen[window].items() if at_us > now_us - SEEN_US}
        return {
            other: Claim(weight=active.get(other, 0), held=held[other], reserved=ask.reserved.get(other, 0))
            for other in active.keys() | ask.reserved.keys()
        }
