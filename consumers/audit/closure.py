"""Whether a replay tells everything: no offset and no writer's number missing, one outcome for every admission.

Pure: the same records give the same evidence, byte for byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from schemas.audit import Admitted, AuditRecord, CancelRequested, Finished, Impersonated, Started, WriterClosed
from schemas.errors import SwitchyardError
from schemas.impersonation import Impersonation
from schemas.jobs import Outcome
from schemas.record import Coordinates, Identity
from schemas.topics import JOBS

# What one replay holds in memory; a longer history is replayed in ranges of time.
EVENTS_MAX = 1_000_000
# One is enough for a verdict; more help to find the cause.
PROBLEMS_MAX = 1_000
# A router remembers a job's id as long as its topic retains: two admissions closer than this were one job.
JOB_MEMORY_MS = JOBS.retention_ms


class HistoryTooLong(SwitchyardError):
    """The range holds too many records of this digest; narrow it with --since and --until."""


class Verdict(StrEnum):
    """Whether the evidence may be relied on."""

    COMPLETE = "COMPLETE"
    INCOMPLETE = "INCOMPLETE"
    EMPTY = "EMPTY"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What was asked for: a digest, its partition, offsets from `start` up to `end`, exclusive."""

    digest: str
    partition: int
    partitions: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One record of the partition, of any digest. `record` is None where the bytes are no audit record."""

    offset: int
    timestamp_ms: int
    key: str
    record: AuditRecord | None


@dataclass
class Story:
    """What the log tells of one job id."""

    admissions: dict[Coordinates, Entry] = field(default_factory=dict)
    outcomes: dict[Coordinates, Entry] = field(default_factory=dict)
    identities: set[Identity] = field(default_factory=set)
    attempts: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class OpenJob:
    """An admission without outcome, and how old it was at the end of the replay."""

    job: str
    offset: int
    age_ms: int


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything a replay found."""

    coverage: Coverage
    events: tuple[Entry, ...]
    read: int
    repeated: int
    admitted: int
    earlier: int
    outcomes: dict[str, int]
    open_jobs: tuple[OpenJob, ...]
    # Their last records are proved by closure alone: they have not said that nothing follows.
    open_writers: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        if self.problems or self.open_jobs:
            return Verdict.INCOMPLETE
        return Verdict.COMPLETE if self.events else Verdict.EMPTY


class Closure:
    """Takes every record of the partition in order, and says in the end what is missing."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._next = coverage.start
        self._events: list[Entry] = []
        self._read = self._repeated = self._last_ms = 0
        self._first: dict[tuple[object, ...], Entry] = {}
        self._stories: dict[tuple[str, str], Story] = {}
        self._numbers: dict[str, int] = {}
        self._closed: set[str] = set()
        self._impersonated: dict[Coordinates, Impersonation] = {}
        self._problems: list[str] = []

    def add(self, entry: Entry) -> None:
        self._read += 1
        self._last_ms = max(self._last_ms, entry.timestamp_ms)
        if entry.offset != self._next:
            self._note(f"offsets {self._next} to {entry.offset - 1} are missing")
        self._next = entry.offset + 1
        if entry.record is None:
            self._note(f"offset {entry.offset} holds no audit record")
            return
        self._number(entry, entry.record)
        if entry.key == self._coverage.digest:
            self._tell(entry, entry.record)

    def evidence(self) -> Evidence:
        if self._next < self._coverage.end:
            self._note(f"offsets {self._next} to {self._coverage.end - 1} are missing")
        counted = {outcome.value: 0 for outcome in Outcome}
        for story in self._stories.values():
            for entry in story.outcomes.values():
                assert isinstance(entry.record, Finished)
                counted[entry.record.outcome.value] += 1
        for name, story in sorted(self._stories.items()):
            for problem in self._judge(name, story):
                self._note(problem)
        return Evidence(
            coverage=self._coverage,
            events=tuple(self._events),
            read=self._read,
            repeated=self._repeated,
            admitted=sum(len(story.admissions) for story in self._stories.values()),
            earlier=sum(not story.admissions for story in self._stories.values()),
            outcomes={name: count for name, count in counted.items() if count},
            open_jobs=tuple(self._open_jobs()),
            open_writers=tuple(sorted(self._numbers.keys() - self._closed)),
            problems=tuple(self._problems),
        )

    def _note(self, problem: str) -> None:
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(problem)

    def _number(self, entry: Entry, record: AuditRecord) -> None:
        """A writer numbers all its records in a partition, whatever their digest, from 0."""
        known = self._numbers.get(record.writer)
        expected = known + 1 if known is not None else 0 if self._coverage.start == 0 else record.writer_seq
        if record.writer_seq != expected:
            self._note(
                f"offset {entry.offset}: writer {record.writer} numbered {record.writer_seq} where {expected} was due"
            )
        if record.writer in self._closed:
            self._note(f"offset {entry.offset}: writer {record.writer} wrote after it had closed")
        if isinstance(record, WriterClosed):
            self._closed.add(record.writer)
        self._numbers[record.writer] = record.writer_seq

    def _tell(self, entry: Entry, record: AuditRecord) -> None:
        name = fold_key(record)
        first = self._first.setdefault(name, entry) if name else entry
        if first is not entry:
            self._repeated += 1
            assert first.record is not None
            if essence(first.record) != essence(record):
                self._note(f"offset {entry.offset} repeats offset {first.offset} with another content")
            return
        if len(self._events) == EVENTS_MAX:
            raise HistoryTooLong
        self._events.append(entry)
        if isinstance(record, Impersonated):
            self._impersonated[record.ingress] = record.impersonation
        if isinstance(record, Admitted | Started | Finished | CancelRequested) and record.identity is not None:
            self._tell_job(entry, record, record.identity)

    def _tell_job(
        self, entry: Entry, record: Admitted | Started | Finished | CancelRequested, identity: Identity
    ) -> None:
        story = self._stories.setdefault((identity.tenant, record.job_id), Story())
        story.identities.add(identity)
        if isinstance(record, Admitted):
            story.admissions[record.ingress] = entry
        elif isinstance(record, Finished):
            story.outcomes[record.metering] = entry
        elif isinstance(record, Started):
            story.attempts.add(record.attempt)

    def _judge(self, name: tuple[str, str], story: Story) -> Iterator[str]:
        job = "/".join(name)
        if len(story.identities) > 1:
            yield f"job {job}: its records carry {len(story.identities)} different identities"
        if any(identity.adapter != self._coverage.digest for identity in story.identities):
            yield f"job {job}: a record of another digest lies under this one"
        times = sorted(entry.timestamp_ms for entry in story.admissions.values())
        if any(later - earlier < JOB_MEMORY_MS for earlier, later in pairwise(times)):
            yield f"job {job}: admitted {len(times)} times"
        if self._coverage.start == 0 and not story.admissions:
            yield f"job {job}: has records, but was never admitted"
        if len(story.outcomes) > max(1, len(story.admissions)):
            yield f"job {job}: {len(story.outcomes)} outcomes"
        ran = {e.record.attempt for e in story.outcomes.values() if isinstance(e.record, Finished) and completed(e)}
        if self._coverage.start == 0 and not ran <= story.attempts:
            yield f"job {job}: completed in an attempt that never started"
        for place, entry in story.admissions.items():
            claimed = entry.record.impersonation if isinstance(entry.record, Admitted) else None
            # A range may begin between the two.
            if claimed != self._impersonated.get(place) and self._coverage.start == 0:
                yield f"job {job}: its admission and the record of who acted in the tenant's name differ"

    def _open_jobs(self) -> Iterator[OpenJob]:
        for (tenant, job_id), story in sorted(self._stories.items()):
            admitted = sorted(story.admissions.values(), key=lambda entry: entry.offset)
            for entry in admitted[len(story.outcomes) :]:
                yield OpenJob(job=f"{tenant}/{job_id}", offset=entry.offset, age_ms=self._last_ms - entry.timestamp_ms)


def completed(entry: Entry) -> bool:
    return isinstance(entry.record, Finished) and entry.record.outcome is Outcome.COMPLETED


def fold_key(record: AuditRecord) -> tuple[object, ...] | None:
    """What two appends of the same fact have in common; None for records that are never appended twice."""
    if isinstance(record, Admitted | CancelRequested | Impersonated):
        return record.type, record.ingress
    if isinstance(record, Finished):
        return record.type, record.metering
    if isinstance(record, Started):
        return record.type, record.identity.tenant, record.job_id, record.attempt, record.request
    return None


def essence(record: AuditRecord) -> dict[str, object]:
    """What must not differ between two appends of the same fact; its number and the ledger's epoch may."""
    return record.model_dump(mode="json", exclude={"writer", "writer_seq", "ledger_epoch", "key_id", "decided_on"})
