"""The log folded into rows: what the ledger must hold. Order and repetition of records do not matter."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ledger.answers import MEMORY_MS, Used
from ledger.keys import member_of
from ledger.rows import Kind, Row
from schemas.audit import Admitted, AuditRecord, CancelRequested, Rejected, Started
from schemas.jobs import DEADLINE_MS_MAX, RejectReason
from schemas.metering import UsageRecorded
from schemas.record import Record

# What of the audit it reads.
FOLDED: tuple[type[AuditRecord], ...] = (Admitted, Started, CancelRequested, Rejected)
# Usage of a job whose row is still remembered may be this much younger than its admission.
WINDOW_MS = MEMORY_MS + DEADLINE_MS_MAX + 3600 * 1000
# Answers that leave the row which was there before as it is.
_NO_ROW = frozenset({RejectReason.JOB_ID_REUSED, RejectReason.CANCELLED, RejectReason.CAPACITY, RejectReason.NOT_READY})


@dataclass
class LogFold:
    """Reads Admitted, Started, CancelRequested, Rejected and UsageRecorded; skips every other record."""

    epoch_max: int = 0
    _admitted: dict[str, tuple[Admitted, int]] = field(default_factory=dict)
    _started: dict[str, list[tuple[int, Started]]] = field(default_factory=dict)
    _cancelled_ms: dict[str, int] = field(default_factory=dict)
    _rejected: dict[str, tuple[Rejected, int]] = field(default_factory=dict)
    _used: dict[str, dict[str, tuple[Used, int]]] = field(default_factory=dict)

    def apply(self, record: Record, timestamp_ms: int) -> None:
        """Take one record, with the time its broker gave it."""
        match record:
            case Admitted():
                self.epoch_max = max(self.epoch_max, record.ledger_epoch)
                self._admit(member_of(record.identity.tenant, record.job_id), record, timestamp_ms)
            case Started():
                member = member_of(record.identity.tenant, record.job_id)
                self._started.setdefault(member, []).append((timestamp_ms, record))
            case CancelRequested():
                _earliest(self._cancelled_ms, member_of(record.tenant, record.job_id), timestamp_ms)
            case Rejected(job_id=str(job_id), body_hash=str()) if record.reason not in _NO_ROW:
                member = member_of(record.tenant, job_id)
                if member not in self._rejected or timestamp_ms < self._rejected[member][1]:
                    self._rejected[member] = (record, timestamp_ms)
            case UsageRecorded():
                self.epoch_max = max(self.epoch_max, record.ledger_epoch)
                self._use(member_of(record.identity.tenant, record.job_id), record, timestamp_ms)

    def rows(self, now_us: int) -> dict[str, Row]:
        """Every row that is remembered at this time."""
        return dict(self.each(now_us))

    def each(self, now_us: int) -> Iterator[tuple[str, Row]]:
        """The same, made one by one."""
        for member in self._cancelled_ms.keys() | self._rejected.keys() | self._used.keys() | self._admitted.keys():
            row = self._row(member, now_us)
            if row.held or row.forget_ms * 1000 > now_us:
                yield member, row

    def _use(self, member: str, record: UsageRecorded, timestamp_ms: int) -> None:
        places = self._used.setdefault(member, {})
        known = places.get(str(record.ingress))
        if known is None or timestamp_ms < known[1]:
            places[str(record.ingress)] = (used_of(record), timestamp_ms)

    def _admit(self, member: str, record: Admitted, timestamp_ms: int) -> None:
        known, first_ms = self._admitted.get(member, (None, timestamp_ms))
        if known is None or record.admitted_at_us > known.admitted_at_us:
            # A later life of the job id; a redelivered job's record is the same life.
            self._admitted[member] = (record, timestamp_ms)
        elif record.admitted_at_us == known.admitted_at_us:
            self._admitted[member] = (known, min(first_ms, timestamp_ms))

    def _row(self, member: str, now_us: int) -> Row:
        """An admission says most of a job, then its usage, a refusal, a cancellation."""
        if member in self._admitted:
            return self._of_admission(member, now_us)
        if member in self._used:
            ingress, (_, at_ms) = max(self._used[member].items(), key=lambda place: place[1][1])
            return Row(kind=Kind.SETTLED, ingress=ingress, forget_ms=at_ms + MEMORY_MS)
        if member in self._rejected:
            return _refused(*self._rejected[member])
        return Row(kind=Kind.CANCELLED, forget_ms=self._cancelled_ms[member] + MEMORY_MS)

    def _of_admission(self, member: str, now_us: int) -> Row:
        record, first_ms = self._admitted[member]
        row = Row.of_record(record)
        if row.ingress in self._used.get(member, {}):
            return row.settled(self._used[member][row.ingress][0])
        row = replace(row, cancelled=member in self._cancelled_ms, restored=True)
        started = [item for at_ms, item in self._started.get(member, []) if at_ms >= first_ms]
        if started:
            last = max(started, key=lambda item: item.attempt)
            row = replace(row, attempt=last.attempt, running=True, request=str(last.request), fence=last.fence)
        return row if row.lease_us > now_us else row.released()


def used_of(record: UsageRecorded) -> Used:
    """What the ledger is told of a usage record."""
    return Used(
        prompt_tokens=record.usage.prompt_tokens,
        completion_tokens=record.usage.completion_tokens,
        load_ms=record.service.load_ms if record.service is not None else 0,
    )


def _earliest(times: dict[str, int], name: str, at_ms: int) -> None:
    times[name] = min(at_ms, times.get(name, at_ms))


def _refused(record: Rejected, at_ms: int) -> Row:
    return Row(
        kind=Kind.REFUSED,
        body=record.body_hash or "",
        ingress=str(record.ingress),
        reason=record.reason.value,
        forget_ms=at_ms + MEMORY_MS,
    )
