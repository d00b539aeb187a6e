"""Traces: what a tenant can read says nothing of another, and what an operator reads says nothing it need not."""

import asyncio
import re
import urllib.request

import pytest
from click.testing import CliRunner

from producers.cli.usage import usage
from schemas.audit import Finished
from schemas.topics import METERING, REPLIES, STREAM
from tests.integration.test_acls import refusal
from tests.isolation.house import ALIASES, CANARY, NORTH, SOUTH, WEST, House
from tests.isolation.notes import Note
from tests.isolation.test_topics import NOT_ALLOWED

pytestmark = pytest.mark.asyncio(loop_scope="package")

DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
# What the fake engine says: `«digest» w1 w2`.
OUTPUT = re.compile(rb"\xc2\xab[0-9a-f]{8}\xc2\xbb|\bw1 w2\b")


def secrets_of(house: House, tenant: str) -> list[bytes]:
    """Names and paths of a tenant that no other may see. The platform's own adapter is everybody's."""
    own = [alias for alias in ALIASES[tenant] if alias.endswith("-secret")]
    digests = [house.digest(tenant, alias) for alias in ALIASES[tenant]]
    return [name.encode() for name in (tenant, *own, *digests, *(d.removeprefix("sha256:") for d in digests))]


async def search_for(house: House, other: str, mine: str) -> int:
    """Nothing that one tenant can read names the other. Returns how many records were searched."""
    searched = 0
    for topic in (STREAM.of(mine), REPLIES.of(mine)):
        for record in await house.world.read(topic):
            content = b"\n".join([record.key or b"", record.value or b"", *(v or b"" for _, v in record.headers)])
            found = [secret for secret in secrets_of(house, other) if secret in content]
            assert not found, (topic, record.coordinates, found)
            searched += 1
    return searched


async def test_a_search_of_everything_a_tenant_can_read(house: House, note: Note) -> None:
    searched = 0
    for mine, other in ((NORTH, SOUTH), (SOUTH, NORTH), (NORTH, WEST), (SOUTH, WEST)):
        await house.ask(mine, f"{other}-secret")
        searched += await search_for(house, other, mine)
    assert searched > 0
    note("search of replies, streams and errors for the other's names", "nothing found", f"{searched} records searched")


async def test_a_search_of_metrics_and_logs(house: House, note: Note) -> None:
    ports = [p.metrics_port for p in house.stack.file.processes.values() if p.metrics_port is not None]
    pages = [await asyncio.to_thread(_page, port) for port in ports]
    pages = [page for page in pages if page]
    assert len(pages) >= 3
    for page in pages:
        assert not DIGEST.search(page)
        for tenant in ALIASES:
            assert not [secret for secret in secrets_of(house, tenant) if secret in page]
    services = ("router", "settler", "worker")
    logs = [path for path in (house.stack.file.home / "logs").glob("*.log") if path.stem.split("-")[0] in services]
    assert len(logs) >= 3
    for path in logs:
        content = path.read_bytes()
        assert CANARY.encode() not in content, path
        assert not OUTPUT.search(content), path
    note(
        "search of metrics and logs",
        "no tenant, alias or digest in a metric; no prompt or output in a log",
        f"{len(pages)} metric pages and {len(logs)} logs searched",
    )


async def test_the_usage_of_the_other(house: House, note: Note) -> None:
    """The operator's command reads records of both; what it prints is one's own, and nothing for a name nobody has."""
    asked = [await house.right(NORTH, "north-secret"), await house.right(SOUTH, "a")]
    # The settler has read what both used.
    proofs = [await house.proof(Finished, job_id=reply.job_id) for reply in asked]
    assert await asyncio.to_thread(refusal, house.stack.kafka(SOUTH), METERING.name) == NOT_ALLOWED
    for form in ((), ("--json",)):
        shown = {tenant: await usage_of(house, tenant, *form) for tenant in (NORTH, SOUTH, "nobody")}
        assert house.digest(NORTH, "north-secret") in shown[NORTH]
        assert house.digest(SOUTH, "a") in shown[SOUTH]
        for mine, other in ((NORTH, SOUTH), (SOUTH, NORTH), ("nobody", NORTH), ("nobody", SOUTH)):
            assert not [secret for secret in secrets_of(house, other) if secret in shown[mine].encode()]
        assert not DIGEST.search(shown["nobody"].encode())
    note(
        "usage of the other: south reads `metering`, and is shown its own usage",
        f"{NOT_ALLOWED}; nothing of north's in south's table or JSON",
        f"{proofs[0]}; {proofs[1]}",
    )


async def usage_of(house: House, tenant: str, *form: str) -> str:
    """What `switchyard usage` prints. It runs an event loop of its own, hence a thread."""
    shell = CliRunner(env={"SWITCHYARD_HOME": str(house.stack.file.home)})
    shown = await asyncio.to_thread(shell.invoke, usage, ["--tenant", tenant, *form])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def _page(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return bytes(answer.read())
    except OSError:
        # A worker that the restart replaced.
        return b""
