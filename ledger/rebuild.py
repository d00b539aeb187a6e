"""The ledger made anew from the log, and compared with it. `python -m ledger.rebuild` is what a launcher runs.

Closed, epoch raised, folded up to the ends of the log as they stood after that, restored, opened: a router that was
granted a lease before the raise has either appended it within those ends, or its job is adopted from its route.
"""

import asyncio
import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from infra.kafka.records import Incoming
from infra.kafka.tail import end_offsets, offset_at, read_range
from infra.redis import Client, connect
from infra.settings import KafkaSettings, RedisSettings, read
from ledger import keys
from ledger.answers import Status
from ledger.fold import FOLDED, WINDOW_MS, LogFold
from ledger.functions.calls import call, load, row_arguments
from ledger.quota import Books
from ledger.rows import Row
from ledger.store import Ledger
from schemas.audit import AuditRecord
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.metering import UsageRecorded
from schemas.record import PlatformDecoder
from schemas.topics import AUDIT, METERING

# One call holds Redis up for as long as it takes to write these.
RESTORE_ROWS_MAX = 200
CLEAR_KEYS_MAX = 1_000
# Only an epoch that is in the log and in no ledger raises it once more.
RAISES_MAX = 3
# A row this near its end may be forgotten between two looks.
FORGET_SLACK_MS = 60_000


class RebuildOvertaken(SwitchyardError):
    """Another rebuild began, or Redis was started anew; that one opens the ledger, or none does."""


class RebuildBusy(SwitchyardError):
    """Another rebuild began a moment ago and is at work."""


class UnreadableAudit(SwitchyardError):
    """The audit holds a record that cannot be read, so that the ledger stays closed."""


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What a rebuild did."""

    epoch: int
    records: int
    rows: int
    leases: int


class Log:
    """Reads what the fold needs, from as far back as any row is remembered; each `read_on` goes on where it stopped."""

    def __init__(self, settings: KafkaSettings, now_us: int) -> None:
        self._settings = settings
        self._since_ms = max(0, now_us // 1000 - WINDOW_MS)
        self._next: dict[tuple[str, int], int] = {}
        self.records = 0

    async def read_on(self, fold: LogFold) -> None:
        for topic in (AUDIT.name, METERING.name):
            ends = await end_offsets(self._settings, topic)
            await asyncio.gather(*(self._read(fold, topic, partition, end) for partition, end in ends.items()))

    async def _read(self, fold: LogFold, topic: str, partition: int, end: int) -> None:
        start = self._next.get((topic, partition))
        if start is None and end > 0:
            start = await offset_at(self._settings, topic, partition, self._since_ms)
        self._next[(topic, partition)] = end
        if start is None or start >= end:
            return
        async for record in read_range(self._settings, topic, partition, start, end):
            self.records += 1
            _apply(fold, record)


_AUDIT = PlatformDecoder[AuditRecord](*FOLDED)
_METERING = PlatformDecoder[UsageRecorded](UsageRecorded)
# As `encode` writes it, so that a record which no fold needs is passed over without being parsed.
_NAMES = tuple(f'"type":"{kind.type_name()}"'.encode() for kind in FOLDED)


def _apply(fold: LogFold, record: Incoming) -> None:
    value = record.value or b""
    try:
        if record.topic == METERING.name:
            fold.apply(_METERING.decode(value), record.timestamp_ms)
        elif any(name in value for name in _NAMES):
            fold.apply(_AUDIT.decode(value), record.timestamp_ms)
    except InvalidRecord as error:
        # The settler dead-letters such usage; its lease ends by time.
        if record.topic == AUDIT.name:
            raise UnreadableAudit(f"{record.coordinates}: {error}") from error


class Gate:
    """The ledger from the operator's side: closing, filling and opening it."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def load(self) -> None:
        await load(self._redis)

    async def raise_epoch(self, floor: int = 0, patience_ms: int = 0) -> int:
        """Close the ledger under a new epoch above `floor`. Raises RebuildBusy where another did so that lately."""
        answer = await call(self._redis, "raise", "", floor, patience_ms)
        if answer[0] == b"busy":
            raise RebuildBusy
        return int(answer[2])

    async def clear(self, epoch: int) -> None:
        cursor = b"0"
        for step in itertools.count():
            if step and cursor == b"0":
                return
            cursor = _expected(await call(self._redis, "clear", "", epoch, cursor, CLEAR_KEYS_MAX))[2]

    async def restore(self, epoch: int, rows: Iterable[tuple[str, Row]]) -> tuple[int, int]:
        """Write rows, and return how many and how many of them are held. The next are made while Redis writes some."""
        batches, count, held = _batches(rows), 0, 0
        writing: asyncio.Task[list[Any]] | None = None
        # In a thread, so that this loop is free to write meanwhile.
        while batch := await asyncio.to_thread(next, batches, None):
            count += batch.rows
            held += batch.held
            if writing is not None:
                _expected(await writing)
            writing = asyncio.create_task(call(self._redis, "restore", "", epoch, *batch.arguments))
        if writing is not None:
            _expected(await writing)
        return count, held

    async def open(self, epoch: int) -> None:
        _expected(await call(self._redis, "open", "", epoch))

    async def now_us(self) -> int:
        """The ledger's own clock, which every row's times come from."""
        return int((await call(self._redis, "status", "", 0))[5])

    async def rows(self) -> dict[str, Row]:
        """Every row as it is stored."""
        found: dict[str, Row] = {}
        async for key in self._redis.scan_iter(match=keys.JOB_PREFIX + "*", count=CLEAR_KEYS_MAX):
            stored = await self._redis.hgetall(key)
            if stored:
                texts = {_text(name): _text(value) for name, value in stored.items()}
                found[_text(key).removeprefix(keys.JOB_PREFIX)] = Row.of_stored(texts)
        return found


async def rebuild(kafka: KafkaSettings, redis: Client, patience_ms: int = 0) -> Rebuilt:
    """Close, raise, fold, restore, open. Whatever it raises leaves the ledger closed.

    With a patience it gives way to a rebuild that began that lately: raises RebuildBusy.
    """
    with _uncollected():
        return await _rebuild(kafka, redis, patience_ms)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Every record of the log becomes values and none of them a cycle: looking for some takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _rebuild(kafka: KafkaSettings, redis: Client, patience_ms: int) -> Rebuilt:
    gate, fold = Gate(redis), LogFold()
    await gate.load()
    epoch = await gate.raise_epoch(patience_ms=patience_ms)
    log = Log(kafka, await gate.now_us())
    for _ in range(RAISES_MAX):
        await log.read_on(fold)
        if fold.epoch_max < epoch:
            break
        epoch = await gate.raise_epoch(fold.epoch_max)
    else:
        raise RebuildOvertaken
    await gate.clear(epoch)
    rows, held = await gate.restore(epoch, fold.each(await gate.now_us()))
    await gate.open(epoch)
    return Rebuilt(epoch=epoch, records=log.records, rows=rows, leases=held)


async def check(kafka: KafkaSettings, redis: Client) -> list[str]:
    """What differs between the ledger and the log, one sentence each. Only means something while nothing moves."""
    gate, fold = Gate(redis), LogFold()
    status = await Ledger(redis).status()
    if not status.open:
        return ["the ledger is closed"]
    await Log(kafka, status.now_us).read_on(fold)
    # Counts before rows, and both as of the counts' time: a lease that ends between the two is no difference.
    status = await Ledger(redis).status()
    live = await gate.rows()
    return differences(live, fold.rows(status.now_us), status.now_us) + miscounted(status, live)


def miscounted(status: Status, live: dict[str, Row]) -> list[str]:
    """One sentence for each sum that is not that of the rows."""
    books = Books(rows=live, is_open=True, epoch=status.epoch)
    derived = books.status(status.now_us)
    found = [
        f"{name}: {getattr(status, name)} is counted, the rows hold {dict(getattr(derived, name))}"
        for name in ("tenants", "adapters", "windows", "references")
        if getattr(status, name) != dict(getattr(derived, name))
    ]
    return found + [
        f"tenant {tenant}: {status.spent.get(tenant)} is counted, the rows make {spent}"
        for tenant, spent in derived.spent.items()
        if status.spent.get(tenant) != spent
    ]


def differences(live: dict[str, Row], folded: dict[str, Row], now_us: int) -> list[str]:
    """One sentence for each job that the ledger holds otherwise than the log."""
    found = []
    for member in sorted(live.keys() | folded.keys()):
        row, expected = live.get(member), folded.get(member)
        if row is None and expected is not None and expected.forget_ms < now_us // 1000 + FORGET_SLACK_MS:
            continue
        ledger = row.at_rest(now_us).stored() if row else {}
        log = expected.at_rest(now_us).stored() if expected else {}
        names = sorted(name for name in ledger.keys() | log.keys() if ledger.get(name) != log.get(name))
        if names:
            said = ", ".join(f"{name} is {ledger.get(name)!r}, the log says {log.get(name)!r}" for name in names)
            found.append(f"job {member}: {said}")
    return found


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _expected(answer: list[bytes]) -> list[bytes]:
    if answer[0] == b"closed":
        raise RebuildOvertaken
    return answer


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Rows as one call takes them."""

    rows: int
    held: int
    arguments: list[str | int]


def _batches(rows: Iterable[tuple[str, Row]]) -> Iterator[_Batch]:
    items = iter(rows)
    while batch := list(itertools.islice(items, RESTORE_ROWS_MAX)):
        arguments = [argument for member, row in batch for argument in row_arguments(member, row)]
        yield _Batch(rows=len(batch), held=sum(row.held for _, row in batch), arguments=arguments)


async def main() -> None:
    """Rebuild with the settings of the environment, as a launcher does before it starts a router."""
    redis = connect(read(RedisSettings))
    try:
        done = await rebuild(read(KafkaSettings), redis)
    finally:
        await redis.aclose()
    print(f"ledger open: epoch {done.epoch}, {done.leases} leases, {done.rows} jobs from {done.records} records")


if __name__ == "__main__":
    asyncio.run(main())
