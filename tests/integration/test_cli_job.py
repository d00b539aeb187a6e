"""`switchyard job` as its own process on the real Kafka; `Answering` plays the pipeline."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.launch.stack import Stack
from schemas.jobs import Outcome, RejectReason
from schemas.record import Record
from tests.answering import Answering, Asked, digest

NewTenant = Callable[[], str]
Start = Callable[..., "subprocess.Popen[str]"]
SECONDS_MAX = 30


@pytest.fixture
def name(tenant: NewTenant) -> str:
    return tenant()


@pytest.fixture
def start(stack: Stack, name: str) -> Start:
    """Starts `switchyard --home … job COMMAND` as the tenant; the stack's file has the credentials."""

    def run(command: str, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "producers.cli", "--home", str(stack.file.home), "job", command, *arguments],
            cwd=Path.cwd(), env={"SWITCHYARD_TENANT": name}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


async def finished(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate, timeout=SECONDS_MAX)
    return process.returncode, out, err


async def test_the_answer_goes_to_standard_output_and_the_receipt_to_standard_error(
    stack: Stack, name: str, start: Start
) -> None:
    async with Answering(stack, name) as answering:
        code, out, err = await finished(start("run", "--alias", "support", "--system", "be brief", "--seed", "1", "hi"))
    assert (code, out) == (0, "<hi>\n")
    assert err.startswith(f"completed (stop): {digest('support')}, attempt 1, 3 prompt + 2 completion tokens, fake-1")
    asked = answering.asked[0].job
    assert [turn.role for turn in asked.messages or ()] == ["system", "user"]
    assert (asked.parameters.seed, asked.parameters.max_tokens) == (1, 256)


async def test_json_prints_the_final_reply_alone(stack: Stack, name: str, start: Start) -> None:
    async with Answering(stack, name):
        code, out, _ = await finished(start("run", "--alias", "support", "--json", "--batch", "hi"))
    assert (code, json.loads(out)["type"], json.loads(out)["text"]) == (0, "JobCompleted", "<hi>")


async def test_a_refusal_exits_with_one_and_says_why(stack: Stack, name: str, start: Start) -> None:
    def refuse(asked: Asked) -> Sequence[Record]:
        return (asked.rejected(RejectReason.UNKNOWN_ALIAS),)

    async with Answering(stack, name, refuse):
        code, out, err = await finished(start("run", "--alias", "other", "hi"))
    assert (code, out.strip()) == (1, "")
    assert err.startswith("rejected: unknown_alias: refused: unknown_alias (job ")


async def test_a_job_that_began_again_shows_only_what_counts_on_its_own_line(
    stack: Stack, name: str, start: Start
) -> None:
    async with Answering(stack, name, lambda _: ()) as answering:
        process = start("run", "--alias", "a", "hi")
        await answering.until(lambda: bool(answering.asked))
        asked = answering.asked[0]
        await answering.say(asked.chunk("lost ", 0))
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.read, 5) == "lost "
        await answering.say(asked.chunk("kept", 0, attempt=2), asked.completed("kept", attempt=2))
        code, out, err = await finished(process)
    assert (code, out) == (0, "\nkept\n")
    assert err.startswith("[begun again, attempt 2]\ncompleted")


async def test_ctrl_c_cancels_the_job_and_shows_what_became_of_it(stack: Stack, name: str, start: Start) -> None:
    async with Answering(stack, name, lambda _: ()) as answering:
        process = start("run", "--alias", "a", "hi")
        await answering.until(lambda: bool(answering.asked))
        process.send_signal(signal.SIGINT)
        await answering.until(lambda: answering.cancelled == [answering.asked[0].job.job_id])
        await answering.say(answering.asked[0].failed(Outcome.CANCELLED, "half an ans"))
        code, _, err = await finished(process)
    assert code == 130
    assert err.startswith("cancelled: the job cancelled")


async def test_a_job_is_taken_back_by_its_id(stack: Stack, name: str, start: Start) -> None:
    async with Answering(stack, name) as answering:
        code, _, _ = await finished(start("cancel", "some-job"))
        await answering.until(lambda: answering.cancelled == ["some-job"])
        assert code == 0
        code, _, err = await finished(start("cancel", "no job"))
    assert (code, err.startswith("Error: job_id: ")) == (1, True)
