"""Logs say what happened and never what was said."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from infra.logs import ActionLog, JsonFormatter, redact


class StoppedClock:
    def now_ms(self) -> int:
        return 1_700_000_000_000

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter("router", StoppedClock()))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    logging.getLogger("switchyard").setLevel(logging.INFO)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def line(written: io.StringIO) -> Any:
    return json.loads(written.getvalue())


def test_a_line_is_one_object_named_by_its_action(written: io.StringIO) -> None:
    ActionLog("decide").info("job.admitted", job_id="j1", partition=3)

    assert line(written) == {
        "time_ms": 1_700_000_000_000,
        "level": "info",
        "process": "router",
        "component": "decide",
        "action": "job.admitted",
        "fields": {"job_id": "j1", "partition": 3},
    }


@pytest.mark.parametrize("name", ["prompt", "messages", "text", "output", "password", "token", "Body", "value"])
def test_content_and_secrets_are_hidden_at_any_depth(name: str) -> None:
    hidden = json.dumps(redact({"job": {"parts": [{name: "the quick brown fox"}]}}))

    assert "fox" not in hidden
    assert "redacted" in hidden


def test_bytes_show_only_their_length_and_long_texts_are_cut() -> None:
    assert redact(b"secret") == "[6 bytes]"
    assert len(str(redact("x" * 10_000))) < 500


def test_an_error_carries_its_traceback(written: io.StringIO) -> None:
    ActionLog("loop").error("loop.failed", cause=ValueError("no"))

    assert "ValueError: no" in line(written)["traceback"]


def test_what_a_library_logs_is_cut_and_marked(written: io.StringIO) -> None:
    logging.getLogger("aiokafka").warning("record %s", "x" * 10_000)

    assert line(written)["action"] == "library.logged"
    assert len(line(written)["detail"]) < 500


def test_an_action_is_a_name_and_never_a_sentence() -> None:
    with pytest.raises(AssertionError):
        ActionLog("decide").info("job admitted for acme")
