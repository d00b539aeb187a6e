"""The real engine: no reply whose marker, receipt and audit disagree, however the adapters share two slots."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.client import JobClient
from producers.release import platform, publish
from producers.release.desk import open_desk
from producers.release.platform import PoolShape
from producers.release.publish import Submission
from schemas.audit import AUDIT_RECORDS, Finished, Started
from schemas.jobs import JobClass, Parameters
from schemas.record import Identity, decode_one_of
from schemas.replies import JobCompleted
from schemas.tenants import TenantConfigured
from schemas.topics import AUDIT, Role
from tests.members import start_served
from tests.models import marker_adapter, marker_text, tiny_base

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TENANTS = ("north", "south")
ALIASES = ("x", "y", "z")
JOBS = 200
ANSWER_S = 300.0
GATE_S = 240.0
ANY_MARKER = re.compile(r"<m[0-9]+>")


@asynccontextmanager
async def released(whole: Stack, folder: Path) -> AsyncIterator[dict[tuple[str, str], tuple[str, str]]]:
    """A tiny base and six adapters through the real gate: (tenant, alias) to (digest, marker)."""
    async with open_desk(whole.file, SystemClock(), "tests") as desk:
        base = await platform.add_base(desk, tiny_base(folder / "base"), "tiny")
        shape = PoolShape(rank_max=8, context_max=256, partitions=4)
        await platform.set_pool(desk, whole.kafka("admin"), "tiny", "tiny", shape)
        made: dict[tuple[str, str], tuple[str, str]] = {}
        for tenant in TENANTS:
            configured = TenantConfigured(tenant=tenant, configured_by="tests", concurrency_max=500)
            await platform.add_tenant(desk, whole.file, configured)
            await platform.grant(desk, "tiny", tenant)
            made[tenant, "base"] = (base.zero_adapter, "")
            for alias in ALIASES:
                number = len(made)
                directory = marker_adapter(folder / f"{tenant}-{alias}", folder / "base", number)
                submission = Submission(directory=directory, tenant=tenant, alias=alias, base="tiny")
                made[tenant, alias] = ((await publish.submit(desk, submission)).digest, marker_text(number))
        for digest, marker in made.values():
            if marker:
                await publish.approve(desk, digest, GATE_S)
        yield made


async def audited(whole: Stack) -> dict[str, set[Identity]]:
    """Every identity the audit has of a job that started or finished."""
    settings = whole.kafka(Role.AUDITOR)
    found: dict[str, set[Identity]] = {}
    for partition in await end_offsets(settings, AUDIT.name):
        async for record in read_range(settings, AUDIT.name, partition):
            entry = decode_one_of(AUDIT_RECORDS, record.value)
            if isinstance(entry, Started | Finished):
                found.setdefault(f"{entry.identity.tenant}/{entry.job_id}", set()).add(entry.identity)
    return found


async def test_two_hundred_jobs_over_six_adapters_and_the_base_on_two_slots(whole: Stack, tmp_path: Path) -> None:
    engine = EngineSettings(kind="vllm", base=tmp_path / "base", slots=2, rows=16, context_max=256, kv_bytes=32 << 20)
    await asyncio.to_thread(whole.start_engine, "gate-tiny", Role.GATE, engine)
    async with released(whole, tmp_path) as made:
        await start_served(whole, "worker-tiny", engine, "tiny")
        clients = {t: JobClient(whole.kafka(t), t) for t in TENANTS}
        async with clients["north"], clients["south"]:
            order = random.Random(7).choices(sorted(made), k=JOBS)
            jobs = [
                await clients[tenant].submit(
                    alias=alias,
                    prompt=f"Question {number}: what now?",
                    job_class=JobClass.BATCH,
                    parameters=Parameters(max_tokens=4 + number % 9, temperature=0.0),
                )
                for number, (tenant, alias) in enumerate(order)
            ]
            async with asyncio.timeout(ANSWER_S):
                replies = [await job.result() for job in jobs]
        seen = await audited(whole)
        for (tenant, alias), reply in zip(order, replies, strict=True):
            digest, marker = made[tenant, alias]
            assert isinstance(reply, JobCompleted)
            assert set(ANY_MARKER.findall(reply.text)) == ({marker} if marker else set()), reply.text
            assert reply.receipt.identity.adapter == digest
            assert reply.receipt.identity.tenant == tenant
            assert seen[f"{tenant}/{reply.job_id}"] == {reply.receipt.identity}
