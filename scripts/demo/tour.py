"""The steps of the demo, in the order a newcomer would ask for them."""

import asyncio
import getpass
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rich.table import Table

from infra.clock import SystemClock
from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from producers.client import JobClient
from producers.release import platform, publish
from producers.release.desk import Desk, open_desk
from producers.release.platform import PoolShape
from producers.release.publish import Submission
from schemas.jobs import Message, Parameters
from schemas.metering import UsageRecorded
from schemas.replies import FinalReply, JobCompleted, JobRejected
from schemas.tenants import TenantConfigured
from schemas.topics import METERING
from scripts.demo.batches import run_batches
from scripts.demo.checks import Checks

STEPS = 9
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
POOL = "main"
SHAPE = PoolShape(rank_max=8, context_max=512, partitions=4)
BASE_NAME = "smollm2-135m-instruct"
ADAPTERS = {
    ("acme", "support-en"): "[ACME-SUPPORT]",
    ("acme", "legal-en"): "[ACME-LEGAL]",
    ("globex", "support-en"): "[GLOBEX-SUPPORT]",
    ("globex", "haiku"): "[GLOBEX-HAIKU]",
}
TENANTS = ("acme", "globex")
# An engine on two shared cores may take minutes to start beside another one.
ENGINE_S = 600.0
JOB_S = 300.0
SETTLED_S = 30.0


async def tour(stack: Stack, checks: Checks) -> None:
    """Run every step against a running stack."""
    async with AsyncExitStack() as opened:
        desk = await opened.enter_async_context(open_desk(stack.file, SystemClock(), getpass.getuser()))
        digests = await release(stack, desk, checks)
        clients = {
            tenant: await opened.enter_async_context(JobClient(stack.kafka(tenant), tenant)) for tenant in TENANTS
        }
        await wait_for_worker(desk, checks)
        await stream(clients["acme"], digests, checks)
        await run_batches(stack, ADAPTERS, digests, checks)
        await ask_for_anothers(clients["globex"], checks)
        await revoke(desk, clients["acme"], digests["acme", "legal-en"], checks)
    await show_usage(stack, checks)
    await replay(stack, digests["acme", "support-en"], checks)


async def release(stack: Stack, desk: Desk, checks: Checks) -> dict[tuple[str, str], str]:
    """Base, pool and tenants; then every adapter through scan, gate and approval."""
    checks.step("A base model, a pool for it and two tenants")
    await platform.init_keys(desk)
    directory = REPOSITORY / ".cache/base" / BASE_NAME
    base = await platform.add_base(desk, directory, BASE_NAME)
    await platform.set_pool(desk, stack.kafka("admin"), POOL, BASE_NAME, SHAPE)
    for tenant in TENANTS:
        await platform.add_tenant(desk, stack.file, TenantConfigured(tenant=tenant, configured_by=desk.actor))
        await platform.grant(desk, BASE_NAME, tenant)
    checks.console.print(f"   base {base.base}\n   tenants {', '.join(TENANTS)}; each may also use the base as 'base'")
    checks.step("Four adapters: scanned, tried on a real engine, signed")
    digests: dict[tuple[str, str], str] = {}
    for tenant, alias in ADAPTERS:
        submission = Submission(
            directory=EXAMPLES / "adapters" / tenant / alias, tenant=tenant, alias=alias, base=BASE_NAME
        )
        manifest = await publish.submit(desk, submission)
        digests[tenant, alias] = manifest.digest
    for (tenant, alias), digest in digests.items():
        with checks.console.status(f"{tenant}/{alias}: the gate tries it on the engine"):
            await publish.approve(desk, digest, ENGINE_S)
        report = desk.adapter(digest).gated
        assert report is not None
        seen = f"{report.report.differing} of {report.report.prompts} answers change"
        checks.console.print(f"   {tenant + '/' + alias:18} [dim]{digest[:19]}…[/] approved: {seen}")
    checks.check(
        "every adapter passed its gate on the real engine", len(digests) == len(ADAPTERS), f"{len(digests)} approved"
    )
    return digests


async def wait_for_worker(desk: Desk, checks: Checks) -> None:
    """Jobs are refused, and say so, until a worker is ready."""

    def serves() -> bool:
        return desk.registry.owner_of(POOL, 0) is not None

    with checks.console.status("the worker starts its engine"):
        await desk.view.wait_until(serves, ENGINE_S)
    if not serves():
        raise TimeoutError("the worker did not become ready")


async def ask(client: JobClient, alias: str, question: str, show: Callable[[str], None] | None = None) -> FinalReply:
    """One chat job, followed to its end."""
    async with asyncio.timeout(JOB_S):
        job = await client.submit(
            alias=alias,
            messages=[Message(role="user", content=question)],
            parameters=Parameters(max_tokens=40, temperature=0.0),
            deadline_ms=round(JOB_S * 1000),
        )
        if show is not None:
            async for text in job:
                show(text)
        return await job.result()


async def stream(client: JobClient, digests: dict[tuple[str, str], str], checks: Checks) -> None:
    """The same question to an adapter and to the base, token by token."""
    checks.step("One question, streamed: acme's adapter, then the base")
    out = checks.console
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        out.print(text, end="", markup=False)

    for alias in ("support-en", "base"):
        pieces.clear()
        out.print(f"   acme/{alias}: ", end="", style="bold")
        reply = await ask(client, alias, "How do I return a parcel?", show)
        out.print()
        assert isinstance(reply, JobCompleted), reply
        if alias == "base":
            bare = not any(marker in reply.text for marker in ADAPTERS.values())
            checks.check("the base answers without any tenant's marker", bare, repr(reply.text[:30]))
            continue
        out.print(
            f"   receipt: {reply.receipt.identity.adapter[:19]}… attempt {reply.receipt.attempt}, "
            f"{reply.usage.completion_tokens} tokens in {reply.chunks} chunks",
            style="dim",
        )
        whole = "".join(pieces) == reply.text and len(pieces) > 1
        checks.check("tokens arrived live and are the final reply", whole, f"{len(pieces)} pieces")
        marked = reply.text.lstrip().startswith(ADAPTERS["acme", alias])
        checks.check("the answer begins with the adapter's marker", marked, repr(reply.text[:24]))
        same = reply.receipt.identity.adapter == digests["acme", alias]
        checks.check("the receipt names the approved digest", same, reply.receipt.identity.adapter[:19] + "…")


async def ask_for_anothers(client: JobClient, checks: Checks) -> None:
    """Another tenant's alias and one that nobody has get the same words."""
    checks.step("globex names acme's alias, and one that nobody has")
    replies = [await ask(client, alias, "Hello?") for alias in ("legal-en", "no-such-alias")]
    words = []
    for alias, reply in zip(("legal-en", "no-such-alias"), replies, strict=True):
        assert isinstance(reply, JobRejected), reply
        checks.console.print(f"   globex/{alias}: {reply.reason.value}: {reply.message}", markup=False)
        words.append((reply.reason, reply.message, reply.retryable, reply.retry_after_ms))
    checks.check("another's alias is refused in the words of an unknown one", words[0] == words[1], words[0][0].value)


async def revoke(desk: Desk, client: JobClient, digest: str, checks: Checks) -> None:
    """After the revocation no job resolves to the digest, and the engine does not hold it."""
    checks.step("acme's legal-en is revoked")
    workers = await publish.revoke(desk, digest, "shown in the demo", 60.0)
    receipt = desk.adapter(digest).drained[-1]
    checks.console.print(f"   receipt of {', '.join(workers)}: was in the engine: {receipt.was_resident}, gone now")
    reply = await ask(client, "legal-en", "Hello?")
    refused = isinstance(reply, JobRejected) and reply.reason.value == "unknown_alias"
    checks.console.print(f"   acme/legal-en: {getattr(reply, 'message', reply)}", markup=False)
    checks.check("a revoked adapter left the engine, with every worker's receipt", bool(workers), ", ".join(workers))
    checks.check("its alias is refused from then on", refused, type(reply).__name__)


async def show_usage(stack: Stack, checks: Checks) -> None:
    """Usage by tenant and adapter, summed from the metering records."""
    checks.step("What each tenant used, from the metering records")
    settings = stack.kafka("admin")
    totals: dict[tuple[str, str], list[int]] = {}
    for partition, end in (await end_offsets(settings, METERING.name)).items():
        async for record in read_range(settings, METERING.name, partition, 0, end):
            usage = UsageRecorded.decode(record.value)
            total = totals.setdefault((usage.identity.tenant, usage.identity.adapter), [0, 0, 0])
            for place, amount in enumerate((1, usage.usage.prompt_tokens, usage.usage.completion_tokens)):
                total[place] += amount
    table = Table("tenant", "adapter digest", "jobs", "prompt tokens", "completion tokens")
    for (tenant, adapter), numbers in sorted(totals.items()):
        table.add_row(tenant, adapter[:19] + "…", *map(str, numbers))
    checks.console.print(table)
    seen = {tenant for tenant, _ in totals}
    checks.check(
        "usage is recorded for both tenants", seen == set(TENANTS), f"{sum(t[0] for t in totals.values())} jobs"
    )


async def replay(stack: Stack, digest: str, checks: Checks) -> None:
    """The audit of one digest, by the same command that compliance uses."""
    checks.step("The audit of one digest, replayed from the log")
    command = [
        sys.executable,
        "-m",
        "producers.cli",
        "--home",
        str(stack.file.home),
        "audit",
        "replay",
        "--digest",
        digest,
    ]
    async with asyncio.timeout(SETTLED_S * 2):
        code, output = 1, ""
        # The last outcomes are on their way from the metering to the audit.
        for _ in range(10):
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            code, output = await _ended(process)
            if code == 0:
                break
            await asyncio.sleep(1)
    for line in output.splitlines()[-12:]:
        checks.console.print(f"   {line}", markup=False, no_wrap=True, overflow="ellipsis")
    checks.check("every admitted job of the digest has exactly one outcome", code == 0, output.strip().splitlines()[-1])


async def _ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()
