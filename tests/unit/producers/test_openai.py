"""OpenAI's batch lines to jobs, and replies to lines."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.client import make_record
from producers.openai import BadLine, Origin, answer_line, parse_line, usage_of
from schemas.jobs import Outcome, RejectReason
from schemas.record import Coordinates
from tests.answering import Asked

PLACE = Coordinates(topic="batch.acme", partition=0, offset=1)
ASKED = Asked(make_record({"job_id": "b-3", "alias": "support", "prompt": "x"}), PLACE, "acme", 1)
ORIGIN = Origin(3, "id-3", model="support")
CHAT_BODY: dict[str, Any] = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}


def chat(**body: object) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT_BODY, **body}}
    return json.dumps(line).encode()


def test_a_chat_line_becomes_a_job_with_its_parameters() -> None:
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    content = chat(messages=turns, max_tokens=9, max_completion_tokens=5, temperature=0, stop="END", seed=1, top_p=None)
    job = make_record({"job_id": "j", **parse_line(content).body.fields()})
    assert [(turn.role, turn.content) for turn in job.messages or ()] == [("system", "be brief"), ("user", "hi")]
    assert (job.parameters.max_tokens, job.parameters.temperature, job.parameters.stop) == (5, 0.0, ("END",))
    assert (job.alias, job.parameters.top_p, job.parameters.seed) == ("support", 1.0, 1)


def test_a_completion_line_becomes_a_prompt() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": ["once"]}}
    assert make_record({"job_id": "j", **parse_line(json.dumps(line).encode()).body.fields()}).prompt == "once"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (chat(n=2), "n"),
        (chat(stream=True), "stream"),
        (chat(tools=[]), "tools"),
        (chat(presence_penalty=0.5), "presence_penalty"),
        (chat(messages=[{"role": "tool", "content": "x"}]), "messages.0.role"),
        (b'{"custom_id": "a", "url": "/v1/embeddings", "method": "POST", "body": {}}', "url"),
        (b'{"custom_id": "a", "url": ["x"]}', "url"),
        (b'{"custom_id": "a", "custom_id": "b"}', None),
        (b'{"a": NaN}', None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b"  \n", None),
    ],
)
def test_a_line_that_cannot_be_honoured_is_refused_and_names_what_is_to_blame(
    content: bytes, param: str | None
) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(content)
    assert caught.value.param == param


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_line_or_a_bad_line(content: bytes) -> None:
    with contextlib.suppress(BadLine):
        parse_line(content)


def test_failures_keep_openais_two_forms() -> None:
    expired = answer_line(ORIGIN, "b-3", ASKED.failed(Outcome.EXPIRED), 7)[1]
    assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")
    early = answer_line(ORIGIN, "b-3", ASKED.rejected(RejectReason.CANCELLED), 7)[1]
    assert (early["response"], early["error"]["code"]) == (None, "batch_cancelled")
    completed, failed = answer_line(ORIGIN, "b-3", ASKED.failed(Outcome.FAILED), 7)
    assert (completed, failed["error"], failed["response"]["status_code"]) == (False, None, 500)
    assert failed["response"]["body"]["error"]["line"] == 3
    for reason in RejectReason:
        completed, line = answer_line(ORIGIN, "b-3", ASKED.rejected(reason), 7)
        assert not completed
        assert usage_of(line).completion_tokens == 0


def test_an_answer_carries_usage_receipt_and_the_time_of_its_record() -> None:
    completed, line = answer_line(ORIGIN, "b-3", ASKED.completed("yes"), 7)
    body = line["response"]["body"]
    assert (completed, line["id"], line["custom_id"]) == (True, "batch_req_b-3", "id-3")
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-b-3", "chat.completion", 7)
    assert body["switchyard"]["receipt"]["identity"]["adapter"].startswith("sha256:")
    assert usage_of(line).prompt_tokens == 3
