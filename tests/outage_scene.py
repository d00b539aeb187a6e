"""A stack of its own with a router, a settler and a worker, whose services go away one after another."""

import asyncio
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from infra.launch.stack import Stack
from infra.settings import EngineSettings
from ledger.store import LedgerUnavailable
from schemas.jobs import JobSubmitted
from schemas.record import decode_one_of
from schemas.replies import FINAL_REPLIES, JobCompleted, JobFailed, JobRejected, JobWaiting, TokensGenerated
from tests.factories import make_job
from tests.members import start_served
from tests.routing import Routing, routing_on, until

ENGINE = EngineSettings(kind="fake", slots=2, rows=4, step_ms=50)
# At 50 ms a token: still running when its service is gone, and before a stale view is noticed.
LONG, LONGER = 80, 260
TENANT = "outage"
GONE = "gone"

Final = JobCompleted | JobFailed | JobRejected
Streamed = TypeVar("Streamed", TokensGenerated, JobWaiting)
Found = TypeVar("Found")


@dataclass(kw_only=True)
class Seen:
    """What one outage looked like from outside."""

    # What became of a job that ran when the service went, or of one that needed nothing of it.
    ran: Final | None = None
    # What became of new jobs while the service was away.
    told: list[Final] = field(default_factory=list)
    notices: list[JobWaiting] = field(default_factory=list)
    # How long it took until a new job was told so.
    took_s: float = 0.0
    # Jobs that were routed meanwhile, and whether Kafka took a client's record.
    routed: set[str] = field(default_factory=set)
    taken: bool = True
    # What /ready said, and how processes ended.
    router: str = ""
    worker: str = ""
    codes: list[int | None] = field(default_factory=list)
    # Final replies to what waited or was sent again, and how often every job so far was answered for good.
    after: list[Final] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def in_order(self) -> bool:
        """What waited or came again was done, and nothing was answered twice. Leases were waited for."""
        done = bool(self.after) and all(isinstance(reply, JobCompleted) for reply in self.after)
        return done and set(self.answers.values()) == {1}


@dataclass(kw_only=True)
class Scene:
    """The processes at hand, and what a tenant sees of them."""

    stack: Stack
    routing: Routing
    router: str
    worker: str

    async def start_worker(self) -> None:
        """A worker of the pool, with a name and a cache of its own."""
        self.worker = f"worker-{len(self.stack.processes)}-{self.routing.world.pool}"
        await start_served(self.stack, self.worker, ENGINE, self.routing.world.pool)

    async def finals(self) -> list[Final]:
        records = await self.routing.world.read(f"replies.{TENANT}")
        replies = [decode_one_of(FINAL_REPLIES, record.value) for record in records]
        return [reply for reply in replies if isinstance(reply, JobCompleted | JobFailed | JobRejected)]

    async def final(self, job: JobSubmitted) -> Final:
        async def found() -> list[Final]:
            return [reply for reply in await self.finals() if reply.job_id == job.job_id]

        return await first(found)

    async def notice(self, job: JobSubmitted) -> JobWaiting:
        return await first(lambda: self._streamed(job, JobWaiting))

    async def start_long(self, tokens: int = LONG) -> JobSubmitted:
        """A job that runs: its first token was seen."""
        job = make_job(alias="a", tokens_max=tokens)
        await self.routing.jobs(job)
        await first(lambda: self._streamed(job, TokensGenerated))
        return job

    async def _streamed(self, job: JobSubmitted, kind: type[Streamed]) -> list[Streamed]:
        records = await self.routing.world.read(f"stream.{TENANT}")
        found = [decode_one_of((TokensGenerated, JobWaiting), record.value) for record in records]
        return [record for record in found if isinstance(record, kind) and record.job_id == job.job_id]

    async def says(self, name: str, right: Callable[[str], bool]) -> str:
        """Wait until a process's readiness says the right thing, and give the whole sentence."""

        async def said() -> list[str]:
            sentence = await asyncio.to_thread(self.ready, name)
            return [sentence] if right(sentence) else []

        return await first(said)

    def ready(self, name: str) -> str:
        port = self.stack.processes[name].spec.metrics_port
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                return str(answer.read().decode().strip())
        except urllib.error.HTTPError as error:
            return error.read().decode().strip()
        except OSError:
            return GONE

    async def look_back(self, seen: Seen) -> Seen:
        """Wait until nothing is held any more, and count every job's answers."""

        async def nothing_held() -> bool:
            try:
                status = await self.routing.ledger.status()
            except LedgerUnavailable:
                return False
            return status.open and status.leases == 0

        await until(nothing_held)
        for reply in await self.finals():
            if reply.job_id is not None and not (isinstance(reply, JobRejected) and reply.retryable):
                seen.answers[reply.job_id] += 1
        return seen


async def first(find: Callable[[], Awaitable[list[Found]]]) -> Found:
    """The first of what is found, once something is."""
    found: list[Found] = []

    async def some() -> bool:
        found[:] = await find()
        return bool(found)

    await until(some)
    return found[0]


@asynccontextmanager
async def scene_on(stack: Stack) -> AsyncIterator[Scene]:
    await asyncio.to_thread(stack.add_tenant, TENANT)
    async with routing_on(stack, [TENANT], rows=0, aliases=("a", "b", "cold")) as routing:
        router = await routing.start()
        scene = Scene(stack=stack, routing=routing, router=router.spec.name, worker="")
        await scene.start_worker()
        yield scene
