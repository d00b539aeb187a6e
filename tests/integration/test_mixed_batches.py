"""A hundred batches on the real engine, each with a row that is cancelled, one late, one broken and one revoked."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.kafka.tail import Tail
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from schemas.adapters import AdapterRevoked
from schemas.jobs import Limits, Outcome, Parameters, RequestCancelled, RequestRouted
from schemas.metering import UsageRecorded
from schemas.replies import FinishReason, JobCompleted, JobFailed
from schemas.topics import ADAPTERS, CANCELS, METERING
from tests.contracts.engine_rigs import altered, poison
from tests.factories import make_job
from tests.mixed_rows import ALIASES, ASKED, CONTEXT_MAX, ENDS, LONG, Fate, Row, Seen, rows_of
from tests.models import marker_adapter, marker_text, tiny_base
from tests.real_world import Version, real_world_on
from tests.workbench import Bench, bench_in

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

BATCHES = 100
# So many batches are in the engine together.
TOGETHER = 5
SLOTS = 10
ROWS = 64
DEADLINE_MS = 4_000
WAIT_S = 120.0
ANY_MARKER = re.compile(r"<m[0-9]+>")
Tenants = Callable[[], str]


class Scene:
    """A worker's surroundings, what it says, and the jobs that it was given."""

    def __init__(self, bench: Bench, seen: Seen, heard: Tail) -> None:
        self.bench = bench
        self.seen = seen
        self.heard = heard
        self.given: list[tuple[Row, RequestRouted]] = []
        self.solo: dict[tuple[str, str, str, int], str] = {}

    async def give(self, rows: list[Row]) -> list[RequestRouted]:
        """Put jobs on the pool's topic, all at once."""
        requests = [await self._admit(row) for row in rows]
        self.given += zip(rows, requests, strict=True)
        await asyncio.gather(*(self.bench.route(request) for request in requests))
        return requests

    async def until(self, condition: Callable[[], bool]) -> None:
        assert await self.heard.wait_until(condition, WAIT_S)

    async def ended(self, requests: list[RequestRouted]) -> None:
        names = {request.job.job_id for request in requests}
        await self.until(lambda: names <= self.seen.replies.keys() and names <= self.seen.usage.keys())

    async def alone(self) -> None:
        """The answers with nothing beside them: what every batch must reproduce."""
        for tenant in self.bench.tenants:
            for alias in ALIASES:
                for prompt, tokens in ASKED:
                    row = Row(fate=Fate.WELL, tenant=tenant, alias=alias, prompt=prompt, tokens=tokens)
                    requests = await self.give([row])
                    await self.ended(requests)
                    self.solo[row.asked] = self.seen.replies[requests[0].job.job_id][0].text

    async def batch(self, number: int) -> None:
        """Give a batch, cancel one of its rows and revoke the adapter of another in mid-run, and see all of it end."""
        rows = rows_of(number, self.bench.tenants)
        requests = await self.give(rows)
        of = {row.fate: request for row, request in zip(rows, requests, strict=True)}
        await asyncio.gather(self._cancel(of[Fate.CANCELLED]), self._revoke(of[Fate.REVOKED]))
        await self.ended(requests)

    async def _admit(self, row: Row) -> RequestRouted:
        counted = 1 if row.fate is Fate.UNCOUNTED else 0
        fields: dict[str, object] = {"limits": Limits(tokens_max=LONG, context_max=CONTEXT_MAX, prompt_tokens=counted)}
        if row.fate is Fate.LATE:
            fields["expires_at_ms"] = SystemClock().now_ms() + DEADLINE_MS
        parameters = Parameters(max_tokens=row.tokens, temperature=0.0)
        job = make_job(alias=row.alias, prompt=row.prompt, parameters=parameters)
        return await self.bench.admit(row.tenant, job, **fields)

    async def _cancel(self, request: RequestRouted) -> None:
        job_id, identity = request.job.job_id, request.route.identity
        await self.until(lambda: self.seen.tokens[job_id] > 0)
        await self.bench.ledger.cancel(identity.tenant, job_id)
        record = RequestCancelled(identity=identity, job_id=job_id, ingress=request.route.ingress)
        await self.bench.world.publisher.publish(CANCELS.of(self.bench.world.pool), job_id, record)

    async def _revoke(self, request: RequestRouted) -> None:
        digest = request.route.identity.adapter
        await self.until(lambda: self.seen.tokens[request.job.job_id] > 0)
        record = AdapterRevoked(adapter=digest, reason="test", revoked_by="test")
        await self.bench.world.append([(ADAPTERS.name, digest, record)])


def markers_of(tenants: list[str]) -> dict[tuple[str, str], int]:
    """Every alias there will be, with the number of its marker."""
    stable = [(tenant, alias) for tenant in tenants for alias in ALIASES]
    markers = {pair: place for place, pair in enumerate(stable)}
    for number in range(BATCHES):
        markers[tenants[number % 2], f"revoked-{number}"] = len(stable) + number % 50
    return markers


@asynccontextmanager
async def scene_on(stack: Stack, tenants: list[str], folder: Path) -> AsyncIterator[Scene]:
    base = tiny_base(folder / "base")
    files = [marker_adapter(folder / f"marker-{marker}", base, marker) for marker in range(54)]
    poisoned = altered(folder / "poisoned", base, poison)
    versions = [Version(tenant=t, alias=a, files=files[marker]) for (t, a), marker in markers_of(tenants).items()]
    versions += [
        Version(tenant=row.tenant, alias=row.alias, files=poisoned)
        for number in range(BATCHES)
        for row in rows_of(number, tenants)
        if row.fate is Fate.CORRUPTED
    ]
    limits = {"loads_per_minute": 100_000}
    async with bench_in(stack, lambda pool: real_world_on(stack, pool, base, versions, limits)) as bench:
        topics = [METERING.name, ADAPTERS.name, *(f"{kind}.{t}" for kind in ("replies", "stream") for t in tenants)]
        seen = Seen()
        heard = Tail(stack.kafka("admin"), topics, seen.take, SystemClock())
        await heard.start()
        hearing = asyncio.create_task(heard.run())
        try:
            yield Scene(bench, seen, heard)
        finally:
            await heard.stop()
            await asyncio.gather(hearing, return_exceptions=True)


@pytest.fixture
def engine(tmp_path: Path) -> EngineSettings:
    return EngineSettings(
        kind="vllm", base=tmp_path / "base", slots=SLOTS, rows=ROWS, context_max=CONTEXT_MAX, kv_bytes=128 << 20
    )


async def run_all(scene: Scene) -> None:
    """All batches, some of them together."""
    places = asyncio.Semaphore(TOGETHER)

    async def one(number: int) -> None:
        async with places:
            await scene.batch(number)

    await scene.alone()
    async with asyncio.TaskGroup() as batches:
        for number in range(BATCHES):
            batches.create_task(one(number))


async def test_what_befalls_one_row_of_a_hundred_batches_befalls_no_other(
    stack: Stack, tenant: Tenants, tmp_path: Path, engine: EngineSettings
) -> None:
    tenants = [tenant(), tenant()]
    async with scene_on(stack, tenants, tmp_path) as scene:
        pool = scene.bench.world.pool
        worker = await asyncio.to_thread(stack.start_engine, f"worker-{pool}", engine=engine, pool=pool)
        try:
            await run_all(scene)
            revoked = {r.route.identity.adapter for row, r in scene.given if row.fate is Fate.REVOKED}
            await scene.until(lambda: revoked <= scene.seen.drained.keys())
        finally:
            worker.kill()
        # Read once more from the log: one reply and one usage record of each job.
        replies = {reply.job_id: reply for reply in await scene.bench.finished(len(scene.given))}
        usage = {record.job_id: record for record in await scene.bench.usage()}
        markers = markers_of(tenants)
        for row, request in scene.given:
            reply, used = replies[request.job.job_id], usage[request.job.job_id]
            assert reply.receipt.identity == used.identity == request.route.identity
            assert reply.receipt.identity.adapter == scene.bench.world.digests[row.tenant, row.alias]
            assert reply.ingress == used.ingress == request.route.ingress
            assert (reply.receipt.attempt, reply.usage) == (1, used.usage)
            assert_fate(row, reply, used)
            if row.fate is Fate.WELL:
                assert reply.text == scene.solo[row.asked]
            if reply.text:
                assert set(ANY_MARKER.findall(reply.text)) == {marker_text(markers[row.tenant, row.alias])}
        assert {scene.seen.drained[digest] for digest in revoked} == {1}, "each revocation took the row it was for"
        assert_company(scene, usage)


def assert_fate(row: Row, reply: JobCompleted | JobFailed, used: UsageRecorded) -> None:
    """The row ended as it was to end, and so says its usage."""
    if isinstance(reply, JobCompleted):
        assert (row.fate, used.outcome) == (Fate.WELL, Outcome.COMPLETED)
        assert (reply.usage.completion_tokens, reply.finish_reason) == (row.tokens, FinishReason.LENGTH)
        return
    assert (reply.outcome, reply.code) == ENDS[row.fate]
    assert used.outcome is reply.outcome
    if row.fate in (Fate.CANCELLED, Fate.LATE, Fate.REVOKED):
        assert 0 < reply.usage.completion_tokens < LONG
        assert reply.text
    else:
        assert (reply.usage.completion_tokens, reply.text) == (0, "")


def assert_company(scene: Scene, usage: dict[str, UsageRecorded]) -> None:
    """What befell a row befell it beside rows that went on."""
    well = [usage[request.job.job_id] for row, request in scene.given if row.fate is Fate.WELL]
    for fate in (Fate.CANCELLED, Fate.LATE, Fate.REVOKED):
        ends = [usage[request.job.job_id].ended_at_ms for row, request in scene.given if row.fate is fate]
        beside = [sum((u.started_at_ms or u.ended_at_ms) < end < u.ended_at_ms for u in well) for end in ends]
        assert sum(rows > 0 for rows in beside) >= BATCHES // 10, (fate, sorted(beside))
