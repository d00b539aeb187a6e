"""What is known of one job, as a value: in Redis a hash, in the fold of the log what that hash must be."""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from pydantic import TypeAdapter

from ledger.answers import LEASE_GRACE_MS, MEMORY_MS, Decision, Used
from ledger.fairness import cost
from ledger.keys import window_of
from schemas.audit import Admitted
from schemas.jobs import Route
from schemas.record import Coordinates


class Kind(StrEnum):
    """What is known of a job id."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    #: Taken back before it arrived.
    CANCELLED = "cancelled"
    #: Its usage is known and its admission is not.
    SETTLED = "settled"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job's row: in Redis a hash, where a field that is zero or empty is not stored."""

    kind: Kind
    body: str = ""
    ingress: str = ""
    decision: str = ""
    digest: str = ""
    window: str = ""
    expires_ms: int = 0
    lease_us: int = 0
    admitted_us: int = 0
    epoch: int = 0
    #: Holds a place, concurrency and a reference.
    held: bool = False
    #: Tokens held at admission, and the weight and lift of its cost.
    reserve: int = 0
    weight: int = 0
    lift: int = 0
    #: What it counts for now in its tenant's minute and day, and in its counter: reserved, used, or given back.
    tokens: int = 0
    cost: int = 0
    ended: bool = False
    cancelled: bool = False
    attempt: int = 0
    crashes: int = 0
    #: An execution began and has neither ended nor been handed over.
    running: bool = False
    #: Came from the log and has not begun since: the next attempt leaves one number out.
    restored: bool = False
    request: str = ""
    fence: str = ""
    reason: str = ""
    message: str = ""
    #: A row that holds a lease is not forgotten, whatever this says.
    forget_ms: int = field(default=0, compare=False)

    @classmethod
    def admitted(
        cls,
        *,
        decision: Decision,
        body: str,
        ingress: Coordinates,
        admitted_us: int,
        lease_us: int,
        epoch: int,
        lift: int = 0,
        memory_ms: int = MEMORY_MS,
    ) -> "Row":
        """A job that holds a lease."""
        limits = decision.limits
        return cls(
            kind=Kind.ADMITTED,
            body=body,
            ingress=str(ingress),
            decision=decision.encode().decode(),
            digest=decision.identity.adapter,
            window=window_of(decision.pool, decision.partition),
            expires_ms=decision.expires_at_ms,
            lease_us=lease_us,
            admitted_us=admitted_us,
            epoch=epoch,
            held=True,
            reserve=decision.reserve,
            weight=decision.weight,
            lift=lift,
            tokens=decision.reserve,
            cost=lift + cost(limits.prompt_tokens, limits.tokens_max, 0, decision.weight),
            forget_ms=admitted_us // 1000 + memory_ms,
        )

    @classmethod
    def of_record(cls, record: Admitted) -> "Row":
        return cls.admitted(
            decision=Decision.of_admitted(record),
            body=record.body_hash,
            ingress=record.ingress,
            admitted_us=record.admitted_at_us,
            lease_us=record.lease_ends_at_us,
            epoch=record.ledger_epoch,
            lift=record.lift,
        )

    @classmethod
    def of_route(cls, route: Route) -> "Row":
        """The same row from the route that was signed after `Admitted` was appended."""
        row = cls.admitted(
            decision=Decision.of_route(route),
            body=route.body_hash,
            ingress=route.ingress,
            admitted_us=route.admitted_at_us,
            lease_us=(route.expires_at_ms + LEASE_GRACE_MS) * 1000,
            epoch=route.ledger_epoch,
            lift=route.lift,
        )
        return replace(row, restored=True)

    @classmethod
    def of_stored(cls, stored: dict[str, str]) -> "Row":
        return _ROW.validate_python(stored)

    def stored(self) -> dict[str, str]:
        """The fields of the Redis hash."""
        values = {name: getattr(self, name) for name in STORED}
        return {name: str(int(value) if isinstance(value, bool) else value) for name, value in values.items() if value}

    def settled(self, used: Used) -> "Row":
        """With what was used instead of what was reserved, and without what only an execution needs."""
        return replace(
            self, held=False, ended=True, cancelled=False, attempt=0, crashes=0, running=False, restored=False,
            request="", fence="", tokens=min(self.reserve, used.prompt_tokens + used.completion_tokens),
            cost=self.lift + cost(used.prompt_tokens, used.completion_tokens, used.load_ms, self.weight),
        )  # fmt: skip

    def released(self) -> "Row":
        """Its time is over. One that never began has used nothing; of one that began, usage will say what it used."""
        if self.attempt:
            return replace(self, held=False)
        return replace(self, held=False, tokens=0, cost=self.lift)

    def at_rest(self, now_us: int) -> "Row":
        """Without what the log does not tell: orderly hand-overs, wording, and leases whose time is over."""
        row = self.released() if self.held and self.lease_us <= now_us else self
        return replace(row, crashes=0, running=False, restored=False, message="", forget_ms=0)


STORED = tuple(item.name for item in fields(Row))
_ROW = TypeAdapter(Row)
