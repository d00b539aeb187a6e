"""`switchyard batch run` as its own process on the real Kafka, stopped in every way; `Answering` plays the rest."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.launch.stack import Stack
from producers.batch_files import State
from schemas.jobs import Outcome, RejectReason
from schemas.record import Record
from tests.answering import Answering, Asked, echo

NewTenant = Callable[[], str]
BAR_SECONDS_MAX = 60


def line(number: int, **body: object) -> dict[str, object]:
    content = {"model": "support", "messages": [{"role": "user", "content": f"question {number}"}], **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": content}


@dataclass
class Files:
    """One batch on disk, and the command that runs it."""

    folder: Path
    stack: Stack
    tenant: str
    # Where an operator runs it in the tenant's name.
    grant: Path | None = None

    def write(self, lines: Sequence[object]) -> None:
        texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
        (self.folder / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))

    def start(self, *options: str) -> subprocess.Popen[str]:
        files = ["in.jsonl", "--out", "out.jsonl", "--errors", "err.jsonl"]
        way_in, user = ["--tenant", self.tenant], self.tenant
        if self.grant is not None:
            way_in, user = ["--as-tenant", self.tenant, "--grant", str(self.grant)], "admin"
        return subprocess.Popen(
            [sys.executable, "-m", "producers.cli", "batch", "run", *way_in, *files, *options],
            cwd=self.folder,
            env={"PYTHONPATH": str(Path.cwd()), **self.stack.kafka(user).environment()},
            stderr=subprocess.PIPE,
            text=True,
        )

    async def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        _, said = await asyncio.to_thread(process.communicate, timeout=BAR_SECONDS_MAX)
        return process.returncode, said

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    def custom_ids(self) -> list[str]:
        return sorted(str(found["custom_id"]) for name in ("out.jsonl", "err.jsonl") for found in self.read(name))


@pytest.fixture
def files(tmp_path: Path, stack: Stack, tenant: NewTenant) -> Files:
    return Files(tmp_path, stack, tenant())


async def test_every_line_is_answered_in_openais_form(stack: Stack, files: Files) -> None:
    files.write([line(1), line(2, max_tokens=5)])
    async with Answering(stack, files.tenant):
        code, said = await files.run()
    assert (code, said.splitlines()[-1]) == (0, "2 lines: 2 completed, 0 errors; 6 prompt + 4 completion tokens")
    answers = {found["custom_id"]: found for found in files.read("out.jsonl")}
    body = answers["id-1"]["response"]["body"]
    assert answers["id-1"]["error"] is None
    assert answers["id-1"]["response"]["status_code"] == 200
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "<question 1>"}
    assert (body["model"], body["usage"]["total_tokens"]) == ("support", 5)
    assert body["switchyard"]["receipt"]["identity"]["tenant"] == files.tenant


async def test_each_bad_line_costs_only_itself(stack: Stack, files: Files) -> None:
    bad = ["", "{", '"x"', '{"custom_id": "u", "url": "/v1/embeddings"}', "x" * (3 << 20), line(1)]
    files.write([line(1), *bad, line(8, n=2), line(9, temperature=9), line(10)])
    async with Answering(stack, files.tenant):
        code, _ = await files.run()
    assert code == 0
    assert sorted(found["custom_id"] for found in files.read("out.jsonl")) == ["id-1", "id-10"]
    errors = [found["response"]["body"]["error"] for found in files.read("err.jsonl")]
    assert [error["line"] for error in errors] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert errors[5]["message"] == "line 7: 'custom_id' is that of line 1 already"
    assert [error["param"] for error in errors[5:]] == ["custom_id", "n", "parameters.temperature"]


async def test_a_failed_job_is_an_error_line_and_a_refused_one_is_tried_again(stack: Stack, files: Files) -> None:
    def fate(asked: Asked) -> Sequence[Record]:
        number = int((asked.job.messages or ())[0].content.split()[1])
        if number == 1 and asked.times < 3:
            return (asked.rejected(RejectReason.NOT_READY, retry_after_ms=10),)
        fates = {2: asked.rejected(RejectReason.UNKNOWN_ALIAS), 3: asked.failed(Outcome.EXPIRED)}
        return (fates.get(number, asked.completed("yes")),)

    files.write([line(number) for number in range(1, 5)])
    async with Answering(stack, files.tenant, fate):
        code, said = await files.run()
    assert (code, len(files.read("out.jsonl"))) == (0, 2)
    assert "2 errors (1 batch_expired, 1 model_not_found)" in said
    by_id = {found["custom_id"]: found for found in files.read("err.jsonl")}
    assert by_id["id-2"]["response"]["status_code"] == 404
    assert (by_id["id-3"]["response"], by_id["id-3"]["error"]["code"]) == (None, "batch_expired")


@pytest.mark.slow
async def test_a_batch_killed_at_random_points_ends_with_every_line_once(stack: Stack, files: Files) -> None:
    files.write([line(number) if number % 10 else "no json" for number in range(300)])
    dice = random.Random(3)

    async with Answering(stack, files.tenant, pause_s=0.005):
        for _ in range(8):
            process = files.start()
            await asyncio.sleep(dice.uniform(0.3, 1.8))
            process.kill()
            await asyncio.to_thread(process.communicate)
            # A kill in the middle of a write, which a file system rarely grants a test. One that came before the
            # batch had begun wrote nothing, and a file that is no batch's would rightly be refused.
            if State.path(files.folder / "out.jsonl").exists():
                with (files.folder / "out.jsonl").open("a") as out:
                    out.write('{"id": "batch_req_half a li')
        code, _ = await files.run()
    assert code == 0
    found = files.custom_ids()
    assert len(found) == 300
    assert sorted(text for text in found if text != "None") == sorted(f"id-{n}" for n in range(300) if n % 10)


async def test_ctrl_c_says_how_to_resume_and_can_take_the_rest_back(stack: Stack, files: Files) -> None:
    def half(asked: Asked) -> Sequence[Record]:
        return echo(asked) if len(answering.asked) <= 5 else ()

    files.write([line(number) for number in range(10)])
    async with Answering(stack, files.tenant, half) as answering:
        process = files.start("--cancel-on-interrupt")
        await answering.until(lambda: len(answering.asked) == 10)
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate)
        await answering.until(lambda: len(answering.cancelled) >= 5)
        assert process.returncode == 130
        assert "Run the same command again to resume." in said
        answering.script = lambda asked: (asked.failed(Outcome.CANCELLED),)
        code, said = await files.run()
    assert code == 0
    assert files.custom_ids() == sorted(f"id-{number}" for number in range(10))
    assert "batch_cancelled" in said


async def test_another_input_or_foreign_files_are_refused_before_anything_is_submitted(
    stack: Stack, files: Files
) -> None:
    async with Answering(stack, files.tenant) as answering:
        files.write([line(1)])
        assert (await files.run())[0] == 0
        assert (await files.run())[0] == 0
        files.write([line(1), line(2)])
        code, said = await files.run()
        assert (code, "begun with another input" in said) == (1, True)
        (files.folder / "out.jsonl.state.json").unlink()
        code, said = await files.run()
        assert (code, "is no unfinished batch" in said) == (1, True)
        assert len(answering.asked) == 1
