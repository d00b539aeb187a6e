"""`switchyard audit replay` on the real log, with the auditor's own rights."""

import asyncio
import json
import secrets
from datetime import UTC, datetime

from click.testing import CliRunner, Result

from infra.clock import SystemClock
from infra.kafka.publisher import AuditWriter, Publisher
from infra.launch.stack import Stack
from producers.cli.main import main
from schemas.audit import AdapterEvicted, AdapterLoaded, AuditRecord, EvictReason, LoadReason
from schemas.digest import digest_of
from schemas.jobs import Outcome
from tests.audit_records import admitted, finished, started

BASE = digest_of(b"base")


def new_digest() -> str:
    return digest_of(secrets.token_bytes(8))


def now() -> str:
    return datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).isoformat()


def of_digest(digest: str, *records: AuditRecord) -> list[tuple[str, AuditRecord]]:
    """The records, as if they had happened under this digest."""
    told = []
    for record in records:
        identity = getattr(record, "identity", None)
        changed = {"identity": identity.model_copy(update={"adapter": digest})} if identity else {"adapter": digest}
        told.append((digest, record.model_copy(update=changed)))
    return told


async def write(stack: Stack, digest: str, *records: AuditRecord) -> None:
    publisher = Publisher(stack.kafka("router"), "test", SystemClock())
    await publisher.start()
    writer = AuditWriter(publisher, f"router-{secrets.token_hex(4)}")
    await writer.start()
    await writer.append_all(of_digest(digest, *records))
    await writer.append_all(of_digest(new_digest(), admitted(9)))
    await writer.close()
    await publisher.stop()


async def ask(stack: Stack, digest: str, *options: str) -> Result:
    runner = CliRunner(env={"SWITCHYARD_HOME": str(stack.file.home)})
    return await asyncio.to_thread(runner.invoke, main, ["audit", "replay", "--digest", digest, *options])


def loaded() -> AdapterLoaded:
    return AdapterLoaded(
        adapter=BASE, base=BASE, worker="w", engine="fake", reason=LoadReason.JOB, duration_ms=5, resident_bytes=9
    )


def evicted() -> AdapterEvicted:
    return AdapterEvicted(adapter=BASE, base=BASE, worker="w", engine="fake", reason=EvictReason.TURN, resident_bytes=9)


async def test_everything_of_a_digest_is_told_in_order_and_nothing_of_another(stack: Stack) -> None:
    digest, since = new_digest(), now()
    await write(stack, digest, admitted(1), loaded(), started(1), finished(1), evicted())
    found = await ask(stack, digest, "--since", since)
    kinds = [line.split()[2] for line in found.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert (found.exit_code, found.stdout.splitlines()[-1]) == (0, "COMPLETE")
    assert kinds[:5] == ["Admitted", "AdapterLoaded", "Started", "Finished", "AdapterEvicted"]
    assert "job-9" not in found.stdout


async def test_a_replay_is_the_same_bytes_every_time(stack: Stack) -> None:
    digest, since = new_digest(), now()
    await write(stack, digest, admitted(1), started(1), finished(1), finished(1))
    until = now()
    first = await ask(stack, digest, "--since", since, "--until", until, "--json")
    await write(stack, digest, admitted(2))
    second = await ask(stack, digest, "--since", since, "--until", until, "--json")
    document = json.loads(first.stdout_bytes)
    assert first.stdout_bytes == second.stdout_bytes
    assert (document["verdict"], document["repeated"], document["admitted"]) == ("COMPLETE", 1, 1)


async def test_an_open_job_makes_it_incomplete_until_its_outcome_is_there(stack: Stack) -> None:
    digest, since = new_digest(), now()
    await write(stack, digest, admitted(1))
    open_one = await ask(stack, digest, "--since", since)
    assert (open_one.exit_code, open_one.stdout.splitlines()[-1]) == (1, "INCOMPLETE")
    assert "open: job acme/job-1" in open_one.stdout
    await write(stack, digest, finished(1, outcome=Outcome.CANCELLED))
    assert (await ask(stack, digest, "--since", since)).exit_code == 0


async def test_a_malformed_digest_is_refused_and_an_unknown_one_is_said_to_be_empty(stack: Stack) -> None:
    refused = await ask(stack, "../etc/passwd")
    assert (refused.exit_code, "sha256:" in refused.stderr) == (1, True)
    unknown = await ask(stack, new_digest(), "--since", now())
    assert (unknown.exit_code, "no record of this digest" in unknown.stdout) == (0, True)
    bad_time = await ask(stack, new_digest(), "--since", "yesterday")
    assert (bad_time.exit_code, "ISO 8601" in bad_time.stderr) == (2, True)
