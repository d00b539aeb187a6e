"""The router's loop: poll, answer, append, commit. One line of work per lane, and no lane holds up another.

Order is what survives a crash between any two steps: ledger, audit, requests, and only then the ingress offset. Every
step may be repeated: the ledger answers a record it has seen with the stored decision, which is appended again.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from consumers.router.admission import Admissions
from consumers.router.effects import Effect
from consumers.router.intake import Job, Work, read
from infra.clock import Clock
from infra.failpoints import Failpoints
from infra.kafka.group import Group
from infra.kafka.lane import Lane, LaneLost
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import Incoming
from infra.logs import ActionLog
from infra.metrics import Metrics
from schemas.jobs import JobClass
from schemas.topics import class_of

log = ActionLog("router")

Result = TypeVar("Result")

# A lane's budget per turn: what a flood on one topic can take of everyone's time.
LANE_RECORDS_MAX = 200
# What is asked at once, and appended at once.
PART_RECORDS_MAX = 100
POLL_MS = 100
# A lane that waits for a place asks for it with one job, this often.
RETRY_S_MIN = 0.05
RETRY_S_MAX = 0.25


@dataclass(kw_only=True)
class Line:
    """What was read from one lane and is not done, in order. `place` is the offset that may be committed."""

    lane: Lane
    works: list[Work] = field(default_factory=list)
    # Aliases for which there was no place, with how many of their jobs are asked for at once.
    widths: dict[str | None, int] = field(default_factory=dict)
    retry_at: float = 0.0
    retry_s: float = RETRY_S_MIN
    appending: asyncio.Task[None] | None = None

    @property
    def place(self) -> int:
        return self.works[0].record.offset if self.works else self.lane.next

    @property
    def has_work(self) -> bool:
        return not self.lane.lost and (bool(self.works) or self.place > self.lane.committed)

    @property
    def full(self) -> bool:
        """Whether no more is read. Batch jobs wait where they are; interactive ones are read to hear that they wait."""
        _, job_class = class_of(self.lane.topic)
        return len(self.works) >= (LANE_RECORDS_MAX if job_class is JobClass.INTERACTIVE else 1)

    def take(self, records: Sequence[Incoming]) -> None:
        self.works += [read(record, in_doubt=record.offset < self.lane.opened_end) for record in records]

    def part(self, passed: "Passed") -> list[Work]:
        """What to ask for next, in order: a job that waits holds up its own alias, and no other job.

        Nothing overtakes an earlier record of the same job id, and what is answered in the order of offsets alone
        (an unreadable record) waits for its turn.
        """
        asked: list[Work] = []
        counts: Counter[str | None] = Counter()
        before: set[str | None] = set()
        for work in self.works:
            alias = alias_of(work)
            waits = alias in passed.aliases or work.record.offset in passed.offsets or work.job_id in before
            if waits or counts[alias] == self.widths.get(alias) or (alias is None and before):
                before.add(work.job_id)
                continue
            counts[alias] += 1
            asked.append(work)
            if len(asked) == PART_RECORDS_MAX:
                break
        return asked

    async def appended(self) -> None:
        """Wait until the part before lies in the log: parts are committed in order."""
        if self.appending is not None:
            await self.appending
            self.appending = None

    def widen(self, asked: Sequence[Work], waiting: Set[str | None]) -> None:
        """An alias that waits is asked for with one job, one that went on with twice as many as before."""
        for alias in {alias_of(work) for work in asked}:
            width = self.widths.pop(alias, PART_RECORDS_MAX)
            if alias in waiting:
                self.widths[alias] = 1
            elif 2 * width < PART_RECORDS_MAX:
                self.widths[alias] = 2 * width

    def waits(self, now: float) -> None:
        self.retry_at = now + self.retry_s
        self.retry_s = min(self.retry_s * 2, RETRY_S_MAX)

    def waits_no_more(self) -> None:
        self.retry_at, self.retry_s = 0.0, RETRY_S_MIN


@dataclass(kw_only=True)
class Passed:
    """What a turn leaves: aliases without a place, and offsets whose answer must wait for their turn."""

    aliases: set[str | None] = field(default_factory=set)
    offsets: set[int] = field(default_factory=set)


def alias_of(work: Work) -> str | None:
    return work.job.alias if isinstance(work, Job) else None


class Router:
    """Works on the lanes of a group, turn by turn."""

    def __init__(
        self,
        admissions: Admissions,
        publisher: Publisher,
        audit: AuditWriter,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._admissions = admissions
        self._publisher = publisher
        self._audit = audit
        self._clock = clock
        self._metrics = metrics
        self._failpoints = failpoints
        # Where appending goes on between turns; a failure there ends the process.
        self._tasks = tasks
        self._lines: dict[Lane, Line] = {}

    async def open(self, lanes: Sequence[Lane]) -> None:
        self._lines |= {lane: Line(lane=lane) for lane in lanes}

    async def lose(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self._lines.pop(lane, None)

    async def turn(self, group: Group) -> None:
        """Read what came, and work once on every lane that is not waiting."""
        for lane, records in (await group.poll(self._poll_ms(), LANE_RECORDS_MAX)).items():
            self._metrics.count("records_consumed", len(records))
            if lane in self._lines:
                self._lines[lane].take(records)
        now = self._clock.monotonic()
        due = [line for line in self._lines.values() if line.has_work and line.retry_at <= now]
        await _together([self._work(group, line) for line in due])
        for line in due:
            # So that nothing piles up here; polls go on.
            (group.pause if line.full else group.resume)(line.lane)
        self._metrics.set("partitions_owned", len(self._lines))
        self._metrics.set("partitions_paused", sum(bool(line.works) for line in self._lines.values()))

    def _poll_ms(self) -> int:
        """Not at all where a lane can go on, and not past the moment when one may ask again."""
        now = self._clock.monotonic()
        waits_s = [line.retry_at - now for line in self._lines.values() if line.has_work]
        return max(0, int(min([POLL_MS / 1000, *waits_s]) * 1000))

    async def _work(self, group: Group, line: Line) -> None:
        """Answer what was read, part by part; while one part is appended and committed, the next is answered."""
        if not line.works:
            await line.appended()
            await self._append(group, line, [], line.place)
        passed = Passed()
        while works := line.part(passed):
            await self._admissions.count(works)
            found = await self._answers(works)
            self._failpoints.reach("admit")
            await line.appended()
            answers = {work.record.offset: effect for work, effect in zip(works, found, strict=True)}
            effects, line.works = _settled(line.works, answers)
            line.appending = self._tasks.create_task(self._append(group, line, effects, line.place))
            left = [work for work in line.works if work.record.offset in answers]
            passed.offsets |= {work.record.offset for work in left}
            waiting = {alias_of(work) for work in left if answers[work.record.offset] is None} - {None}
            passed.aliases |= waiting
            line.widen(works, waiting)
        if line.works:
            line.waits(self._clock.monotonic())
            notices = self._admissions.notices(line.works)
            if notices:
                await self._publisher.send_all(notices)
        else:
            line.waits_no_more()

    async def _answers(self, works: Sequence[Work]) -> list[Effect | None]:
        """Together, but for one job id: its records are answered one after another, in the order of the log."""
        found: list[Effect | None] = [None] * len(works)
        waiting: set[str | None] = set()
        for places in _rounds(works):
            asked = [place for place in places if works[place].job_id not in waiting]
            answers = await _together([self._admissions.answer(works[place]) for place in asked])
            for place, answer in zip(asked, answers, strict=True):
                found[place] = answer
            waiting |= {works[place].job_id for place in places if found[place] is None}
        return found

    async def _append(self, group: Group, line: Line, effects: Sequence[Effect], place: int) -> None:
        """Audit, then requests, then replies and the offset: each step lies in the log before the next begins."""
        audit = [entry for effect in effects for entry in effect.audit]
        if audit:
            await self._audit.append_all(audit)
            self._failpoints.reach("admitted")
        appends = [record for effect in effects for record in effect.appends]
        if appends:
            await self._publisher.send_all(appends)
            self._failpoints.reach("routed")
        replies = [record for effect in effects for record in effect.replies]
        try:
            if replies:
                await line.lane.transact(replies, place)
                self._failpoints.reach("replies")
            elif place > line.lane.committed:
                await group.commit(line.lane, place)
                self._failpoints.reach("commit")
        except LaneLost as error:
            # Taken over by another router, or a rebalance under way: committed with what comes next, or by the other.
            log.warning("lane.uncommitted", topic=line.lane.topic, place=place, problem=str(error))
            line.waits(self._clock.monotonic())


def _settled(works: Sequence[Work], answers: Mapping[int, Effect | None]) -> tuple[list[Effect], list[Work]]:
    """The effects to carry out now, and the works that stay. `answers` is by offset; not all were asked for.

    A reply commits with its offset, so one behind a job that waits is made anew when its turn comes; a route behind
    it goes out now, since its job holds a place.
    """
    effects: list[Effect] = []
    left: list[Work] = []
    for work in works:
        effect = answers.get(work.record.offset)
        if effect is None or (left and effect.replies):
            left.append(work)
        else:
            effects.append(effect)
    return effects, left


def _rounds(works: Sequence[Work]) -> list[list[int]]:
    """Places of works such that no round holds one job id twice."""
    seen: Counter[str] = Counter()
    rounds: list[list[int]] = []
    for place, work in enumerate(works):
        name = work.job_id or str(place)
        if seen[name] == len(rounds):
            rounds.append([])
        rounds[seen[name]].append(place)
        seen[name] += 1
    return rounds


async def _together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Every result, in order; the first failure ends the others."""
    if len(works) == 1:
        return [await works[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]
