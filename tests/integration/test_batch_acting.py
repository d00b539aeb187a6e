"""`switchyard batch run --as-tenant`: an operator's batch in a tenant's name, and grants that end before it does."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.keys import load_key
from infra.launch.stack import Stack
from producers import batch
from producers.batch import BatchRun, open_batch
from producers.batch_files import Input, Results
from producers.impersonation import BadGrant
from schemas.digest import canonical
from schemas.impersonation import SignedImpersonation
from schemas.jobs import RejectReason
from schemas.keys import KeyRole
from schemas.record import Record
from tests.answering import Answering, Asked, echo
from tests.factories import make_grant
from tests.integration.test_batch import Files, line

LINES = 10
ALL = sorted(f"id-{number}" for number in range(LINES))


@pytest.fixture
def files(tmp_path: Path, stack: Stack, tenant: Callable[[], str]) -> Files:
    files = Files(tmp_path, stack, tenant())
    files.write([line(number) for number in range(LINES)])
    return files


def give(files: Files, tenant: str | None = None, since_s: int = 0) -> SignedImpersonation:
    """Make out a grant for a minute, and let the next run use it."""
    now_ms = SystemClock().now_ms()
    key = load_key(files.stack.file.keys, KeyRole.ADMIN)
    grant = make_grant(tenant or files.tenant, now_ms - since_s * 1000, 60_000, key)
    files.grant = files.folder / "grant.json"
    files.grant.write_bytes(canonical(grant.model_dump(mode="json")))
    return grant


def known(asked: Asked) -> Sequence[Record]:
    """What a router says of a job id that it knows with another grant, and then what became of the job it knows."""
    if asked.times == 1:
        return echo(asked)
    return (asked.rejected(RejectReason.JOB_ID_REUSED), asked.completed("of the first grant"))


async def test_every_job_carries_the_grant(stack: Stack, files: Files) -> None:
    grant = give(files)
    async with Answering(stack, files.tenant) as answering:
        code, said = await files.run()
    assert (code, said.splitlines()[-1].partition(";")[0]) == (0, f"{LINES} lines: {LINES} completed, 0 errors")
    assert [asked.job.impersonation for asked in answering.asked] == [grant] * LINES


async def test_a_grant_that_is_not_good_sends_nothing_and_begins_nothing(stack: Stack, files: Files) -> None:
    async with Answering(stack, files.tenant) as answering:
        for words, tenant, since_s in (("for another tenant", "somebody", 0), ("has expired", files.tenant, 61)):
            give(files, tenant, since_s)
            code, said = await files.run()
            assert (code, f"nothing was sent: the grant {'is ' * (since_s == 0)}{words}" in said) == (1, True), said
        assert not list(files.folder.glob("out.jsonl*"))
        give(files)
        assert (await files.run())[0] == 0
    assert len(answering.asked) == LINES


async def test_a_stopped_batch_resumes_under_a_new_grant_and_keeps_the_answers_of_the_former(
    stack: Stack, files: Files
) -> None:
    first = give(files)
    async with Answering(stack, files.tenant, lambda asked: echo(asked) if len(answering.asked) <= 4 else ()) as (
        answering
    ):
        process = files.start()
        await answering.until(lambda: len(answering.asked) == LINES)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.communicate)
        answering.script = known
        second = give(files)
        assert second != first
        code, said = await files.run()
    assert (code, f"{LINES} completed, 0 errors" in said) == (0, True)
    assert files.custom_ids() == ALL
    assert not files.read("err.jsonl")


async def test_a_grant_that_ends_in_mid_run_stops_it_and_loses_nothing(
    stack: Stack, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "SUBMIT_JOBS_MAX", 1)
    grant = give(files)
    found = Input.scan(files.folder / "in.jsonl", grant)
    out, errors = files.folder / "out.jsonl", files.folder / "err.jsonl"
    async with Answering(stack, files.tenant) as answering:
        settings = stack.kafka("admin")
        state = await open_batch(settings, files.tenant, found, out, errors)
        results = Results(out, errors, state)
        with pytest.raises(BadGrant, match="those that were go on"):
            await BatchRun(settings, Hasty(), found, state, results, lambda: None).run()
        results.close()
        submitted = len(answering.asked)
        assert 0 < submitted < LINES
        answering.script = known
        give(files)
        code, said = await files.run()
    assert (code, f"{LINES} completed, 0 errors" in said) == (0, True)
    assert files.custom_ids() == ALL
    assert {asked.job.job_id for asked in answering.asked} == {state.job_id(number + 1) for number in range(LINES)}


async def test_a_line_whose_grant_is_refused_is_an_error_line(stack: Stack, files: Files) -> None:
    give(files)
    async with Answering(stack, files.tenant, lambda asked: (asked.rejected(RejectReason.IMPERSONATION),)):
        code, said = await files.run()
    assert (code, f"{LINES} errors ({LINES} impersonation)" in said) == (0, True)
    assert {found["response"]["status_code"] for found in files.read("err.jsonl")} == {403}


async def test_nobody_resumes_anothers_batch(stack: Stack, files: Files) -> None:
    async with Answering(stack, files.tenant) as answering:
        assert (await files.run())[0] == 0
        give(files)
        code, said = await files.run()
        assert (code, "way in (--tenant or --as-tenant)" in said) == (1, True)
    assert len(answering.asked) == LINES


class Hasty(SystemClock):
    """Ten seconds pass whenever somebody asks for the time."""

    def __init__(self) -> None:
        self._passed_ms = 0

    def now_ms(self) -> int:
        self._passed_ms += 10_000
        return super().now_ms() + self._passed_ms
