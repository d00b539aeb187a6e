"""The rules of the ledger on plain values: the specification of the Redis functions.

Every count is derived from the rows, so that nothing here can drift. Time is an argument, in microseconds.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from ledger.answers import (
    Admission,
    AdmitAnswer,
    BeginAnswer,
    Begun,
    BegunCancelled,
    BodyDiffers,
    CancelAnswer,
    CancelRemembered,
    Closed,
    Decision,
    Elsewhere,
    Ended,
    Expired,
    Fenced,
    Flagged,
    Full,
    Granted,
    Refusal,
    RefuseAnswer,
    Refused,
    Remembered,
    SettleAnswer,
    Settled,
    Status,
    TakenBack,
    Unknown,
    Used,
)  # fmt: skip
from ledger.fairness import ACTIVE_US
from ledger.holdings import tenant_of
from ledger.keys import coordinates, member_of
from ledger.places import Places
from ledger.rows import Kind, Row
from schemas.jobs import JobClass, RejectReason
from schemas.record import Coordinates


@dataclass
class Books(Places):
    """All the ledger knows. Methods are named as the Redis functions are, and answer as they do."""

    #: Capacity refusals of interactive records by ingress coordinates, with the time they are forgotten.
    refusals: dict[str, tuple[Full, int]] = field(default_factory=dict)
    epoch: int = 0
    is_open: bool = False

    def raise_epoch(self, floor: int) -> int:
        self.epoch, self.is_open = max(self.epoch, floor) + 1, False
        return self.epoch

    def open(self) -> None:
        self.is_open = True

    def admit(self, ask: Admission, now_us: int) -> AdmitAnswer:
        if not self.is_open:
            return Closed()
        member = member_of(ask.tenant, ask.job_id)
        answer = self._remembered(member, ask.body_hash, now_us)
        if answer is not None:
            return answer
        interactive = ask.decision.job_class is JobClass.INTERACTIVE
        refusal, forget_us = self.refusals.get(str(ask.ingress), (None, 0))
        if interactive and refusal is not None and forget_us > now_us:
            return refusal
        if now_us >= ask.decision.expires_at_ms * 1000:
            return Expired()
        self.sweep(now_us)
        full = self.full(ask, now_us)
        if full is not None:
            if interactive:
                self.refusals[str(ask.ingress)] = (full, now_us + ask.memory_ms * 1000)
            return full
        self.rows[member] = Row.admitted(
            decision=ask.decision,
            body=ask.body_hash,
            ingress=ask.ingress,
            admitted_us=now_us,
            lease_us=(ask.decision.expires_at_ms + ask.grace_ms) * 1000,
            epoch=self.epoch,
            lift=self.lift(ask.tenant, now_us),
            memory_ms=ask.memory_ms,
        )
        return _granted(self.rows[member], repeated=False)

    def refuse(self, refusal: Refusal, now_us: int) -> RefuseAnswer:
        if not self.is_open:
            return Closed()
        member = member_of(refusal.tenant, refusal.job_id)
        answer = self._remembered(member, refusal.body_hash, now_us)
        if answer is not None:
            return answer
        self.rows[member] = Row(
            kind=Kind.REFUSED,
            body=refusal.body_hash,
            ingress=str(refusal.ingress),
            reason=refusal.reason.value,
            message=refusal.message,
            forget_ms=now_us // 1000 + refusal.memory_ms,
        )
        return Refused(reason=refusal.reason, message=refusal.message, ingress=refusal.ingress)

    def begin(self, member: str, request: Coordinates, fence: str, now_us: int) -> BeginAnswer:
        if not self.is_open:
            return Closed()
        row = self._row(member, now_us)
        if row is not None and (row.kind is Kind.SETTLED or row.ended):
            return Ended()
        if row is None or row.kind is not Kind.ADMITTED:
            return Unknown()
        if row.request and row.request != str(request):
            return Elsewhere(request=coordinates(row.request))
        if _older(fence, row.fence):
            return Fenced()
        begun = replace(
            row,
            request=str(request),
            fence=fence,
            attempt=row.attempt + 1 + row.restored,
            # The same life of the same producer did not crash: its last begin was answered into the void.
            crashes=row.crashes + (row.running and row.fence != fence),
            running=True,
            restored=False,
        )
        self.rows[member] = begun
        if row.cancelled:
            return BegunCancelled(attempt=begun.attempt)
        remaining_ms = max(0, row.expires_ms - now_us // 1000)
        return Begun(attempt=begun.attempt, crashes=begun.crashes, remaining_ms=remaining_ms)

    def hand_over(self, member: str, request: Coordinates, attempt: int, now_us: int) -> bool:
        row = self._row(member, now_us)
        if not self.is_open or row is None:
            return False
        if (row.request, row.attempt, row.running) != (str(request), attempt, True):
            return False
        self.rows[member] = replace(row, running=False)
        return True

    def cancel(self, member: str, memory_ms: int, now_us: int) -> CancelAnswer:
        if not self.is_open:
            return Closed()
        row = self._row(member, now_us)
        if row is None:
            self.rows[member] = Row(kind=Kind.CANCELLED, forget_ms=now_us // 1000 + memory_ms)
            return CancelRemembered()
        if row.kind is Kind.CANCELLED:
            return CancelRemembered()
        if row.kind is not Kind.ADMITTED or row.ended:
            return Ended()
        self.rows[member] = replace(row, cancelled=True)
        return Flagged(decision=Decision.decode(row.decision.encode()), ingress=coordinates(row.ingress))

    def settle(self, member: str, ingress: Coordinates, used: Used, memory_ms: int, now_us: int) -> SettleAnswer:
        if not self.is_open:
            return Closed()
        row = self._row(member, now_us)
        if row is None or row.kind is Kind.CANCELLED:
            self.rows[member] = Row(
                kind=Kind.SETTLED,
                ingress=str(ingress),
                forget_ms=now_us // 1000 + memory_ms if row is None else row.forget_ms,
            )
            return Settled(repeated=False)
        if row.kind is not Kind.ADMITTED or row.ended or row.ingress != str(ingress):
            return Settled(repeated=True)
        self.rows[member] = row.settled(used)
        return Settled(repeated=False)

    def adopt(self, member: str, row: Row, now_us: int) -> bool | Closed:
        """Put a row where none is. A cancellation that came meanwhile stands."""
        if not self.is_open:
            return Closed()
        return self.put(member, row, now_us)

    def put(self, member: str, row: Row, now_us: int) -> bool:
        known = self._row(member, now_us)
        if known is not None and known.kind is not Kind.CANCELLED:
            return False
        self.rows[member] = row if known is None else replace(row, cancelled=True)
        return True

    def references(self, digest: str, now_us: int) -> int | Closed:
        if not self.is_open:
            return Closed()
        self.sweep(now_us)
        return sum(row.digest == digest for row in self.held().values())

    def status(self, now_us: int) -> Status:
        if self.is_open:
            self.sweep(now_us)
        held = self.held()
        return Status(
            open=self.is_open,
            epoch=self.epoch,
            leases=len(held),
            tenants=Counter(tenant_of(member) for member in held),
            adapters=Counter(f"{tenant_of(member)}|{row.digest}" for member, row in held.items()),
            windows=Counter(row.window for row in held.values()),
            references=Counter(row.digest for row in held.values()),
            spent={tenant: self.spent(tenant, now_us) for tenant in self.recent(0)},
            now_us=now_us,
        )

    def fairness(self, now_us: int) -> dict[str, int]:
        """The counter of every tenant that was admitted something lately."""
        return {tenant: self.counter(tenant, now_us) for tenant in self.recent(now_us - ACTIVE_US)}

    def _row(self, member: str, now_us: int) -> Row | None:
        row = self.rows.get(member)
        return row if row is not None and (row.held or row.forget_ms > now_us // 1000) else None

    def _remembered(self, member: str, body: str, now_us: int) -> Remembered | None:
        row = self._row(member, now_us)
        if row is None:
            return None
        if row.kind is Kind.CANCELLED:
            return TakenBack()
        if row.kind is Kind.SETTLED:
            return Ended()
        if row.body != body:
            return BodyDiffers()
        if row.kind is Kind.REFUSED:
            return Refused(reason=RejectReason(row.reason), message=row.message, ingress=coordinates(row.ingress))
        return _granted(row, repeated=True)


def _granted(row: Row, *, repeated: bool) -> Granted:
    return Granted(
        decision=Decision.decode(row.decision.encode()),
        ingress=coordinates(row.ingress),
        admitted_at_us=row.admitted_us,
        lease_ends_at_us=row.lease_us,
        epoch=row.epoch,
        lift=row.lift,
        repeated=repeated,
    )


def _older(fence: str, than: str) -> bool:
    """Whether a fence `<producer id>.<epoch>` is an earlier life of the same producer."""
    producer, _, epoch = fence.partition(".")
    other, _, other_epoch = than.partition(".")
    return producer == other and int(epoch) < int(other_epoch)
