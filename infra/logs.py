"""Structured logs: one JSON object a line, named by an action, never a prompt, an output or a secret."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from typing import Final

from infra.clock import Clock, SystemClock

# What a field of this name holds is someone's content or secret, whoever logs it.
REDACTED_FIELDS: Final = frozenset(
    {
        "body", "content", "headers", "messages", "output", "password", "private_key", "prompt",
        "secret", "signature", "text", "token", "tokens", "value",
    }
)  # fmt: skip
REDACTED: Final = "[redacted]"
TEXT_CHARACTERS_MAX: Final = 400
DEPTH_MAX: Final = 4
ITEMS_MAX: Final = 50
ACTION_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


def redact(value: object, depth_left: int = DEPTH_MAX) -> object:
    """A copy that may be logged: named fields hidden, long texts cut, deep structures closed."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping) and depth_left:
        return {
            str(name): REDACTED if str(name).lower() in REDACTED_FIELDS else redact(item, depth_left - 1)
            for name, item in list(value.items())[:ITEMS_MAX]
        }
    if isinstance(value, list | tuple | set | frozenset) and depth_left:
        return [redact(item, depth_left - 1) for item in list(value)[:ITEMS_MAX]]
    text = str(value)
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"


class ActionLog:
    """Logs of one component: `log.info("route.refused", job_id=…, reason=…)`."""

    def __init__(self, component: str) -> None:
        self._logger = logging.getLogger(f"switchyard.{component}")

    def info(self, action: str, **fields: object) -> None:
        self._write(logging.INFO, action, fields)

    def warning(self, action: str, **fields: object) -> None:
        self._write(logging.WARNING, action, fields)

    def error(self, action: str, *, cause: BaseException | None = None, **fields: object) -> None:
        """`cause` adds its traceback."""
        self._write(logging.ERROR, action, fields, cause)

    def _write(self, level: int, action: str, fields: Mapping[str, object], cause: BaseException | None = None) -> None:
        assert ACTION_PATTERN.fullmatch(action), f"an action is named noun.verb, not {action!r}"
        self._logger.log(level, action, extra={"fields": redact(fields)}, exc_info=cause)


class JsonFormatter(logging.Formatter):
    """One line a record. What libraries log is cut, for they may quote what they were given."""

    def __init__(self, process: str, clock: Clock) -> None:
        super().__init__()
        self._process = process
        self._clock = clock

    def format(self, record: logging.LogRecord) -> str:
        ours = record.name.startswith("switchyard.")
        line: dict[str, object] = {
            "time_ms": self._clock.now_ms(),
            "level": record.levelname.lower(),
            "process": self._process,
            "component": record.name.removeprefix("switchyard."),
            "action": record.getMessage() if ours else "library.logged",
        }
        if ours:
            line["fields"] = getattr(record, "fields", {})
        else:
            line["detail"] = redact(record.getMessage())
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(process: str, clock: Clock | None = None, level: int = logging.INFO) -> None:
    """Send this process's logs to standard error. Libraries are heard from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process, clock or SystemClock()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("switchyard").setLevel(level)
