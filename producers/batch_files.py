"""The files of a batch: its input, read twice and never held; its output and errors, which are its memory.

A line is done when it lies in one of the two, whole. What a kill left half written is cut off; so nothing is lost
and nothing repeated, whenever that was.
"""

import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.files import write_private
from producers.client import make_record
from producers.openai import BadLine, Line, Origin, parse_line, usage_of
from schemas.digest import digest_of
from schemas.errors import InvalidRecord, SwitchyardError
from schemas.impersonation import SignedImpersonation
from schemas.jobs import JobSubmitted
from schemas.record import ENVELOPE_BYTES_MAX
from schemas.replies import Usage

# OpenAI's bounds for a batch file.
LINES_MAX = 50_000
FILE_BYTES_MAX = 200_000_000
LINE_BYTES_MAX = ENVELOPE_BYTES_MAX


class BatchRefused(SwitchyardError):
    """This batch cannot be run as it was asked for."""


@dataclass(frozen=True)
class Place:
    """Where a good line lies in the input."""

    origin: Origin
    position: int
    size: int


@dataclass
class Input:
    """What one pass over the input found. Holds no line's content."""

    path: Path
    # What every job carries where an operator submits the batch in the tenant's name.
    grant: SignedImpersonation | None = None
    digest: str = ""
    lines: int = 0
    good: dict[int, Place] = field(default_factory=dict)
    bad: list[tuple[Origin, BadLine]] = field(default_factory=list)

    @classmethod
    def scan(cls, path: Path, grant: SignedImpersonation | None = None) -> Self:
        """Check every line. Raises BatchRefused when the file as a whole is not a batch."""
        if not path.is_file():
            raise BatchRefused(f"{path} is no regular file; a batch is read more than once")
        found = cls(path, grant)
        seen: dict[str, int] = {}
        whole = hashlib.sha256()
        with path.open("rb") as file:
            for number, position, content, size in _lines(file, whole):
                if number > LINES_MAX or position + size > FILE_BYTES_MAX:
                    raise BatchRefused(f"a batch has at most {LINES_MAX} lines and {FILE_BYTES_MAX} bytes; split it")
                found.lines = number
                found._check(number, position, content, size, seen)
        found.digest = f"sha256:{whole.hexdigest()}"
        return found

    def job(self, place: Place, job_id: str) -> JobSubmitted:
        """Read a good line again, as a job. Raises BatchRefused when the file changed meanwhile."""
        with self.path.open("rb") as file:
            file.seek(place.position)
            content = file.read(place.size)
        try:
            line = parse_line(content)
            if line.custom_id == place.origin.custom_id:
                return self._record(line, job_id)
        except InvalidRecord as error:
            raise BatchRefused(f"line {place.origin.number} of {self.path} changed while it was run") from error
        raise BatchRefused(f"line {place.origin.number} of {self.path} changed while it was run")

    def _check(self, number: int, position: int, content: bytes | None, size: int, seen: dict[str, int]) -> None:
        try:
            line = self._checked(content, size)
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                raise BadLine(f"'custom_id' is that of line {first} already", line.custom_id, "custom_id")
        except BadLine as error:
            self.bad.append((Origin(number, error.custom_id), error))
            return
        origin = Origin(number, line.custom_id, line.url, line.body.model)
        self.good[number] = Place(origin, position, size)

    def _checked(self, content: bytes | None, size: int) -> Line:
        if content is None:
            raise BadLine(f"the line has {size} bytes; at most {LINE_BYTES_MAX} are taken")
        line = parse_line(content)
        try:
            self._record(line, "check")
        except InvalidRecord as error:
            raise BadLine(str(error), line.custom_id, str(error).partition(":")[0]) from error
        return line

    def _record(self, line: Line, job_id: str) -> JobSubmitted:
        return make_record({"job_id": job_id, **line.body.fields(), "impersonation": self.grant})


def _lines(file: BinaryIO, whole: Any) -> Iterator[tuple[int, int, bytes | None, int]]:
    """(number, position, content or None when it is too long, size) of each line; `whole` hashes the file."""
    number = position = 0
    while piece := file.readline(LINE_BYTES_MAX):
        number, size, content = number + 1, len(piece), piece
        whole.update(piece)
        while len(piece) == LINE_BYTES_MAX and not piece.endswith(b"\n"):
            piece = file.readline(LINE_BYTES_MAX)
            size += len(piece)
            whole.update(piece)
        yield number, position, content if size < LINE_BYTES_MAX else None, size
        position += size


class State(BaseModel):
    """What a batch was begun with, beside its output. It is written before the first job is submitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = 1
    input: str
    tenant: str
    # Whether an operator began it in the tenant's name.
    acting: bool = False
    errors: Path
    # Where `replies.<tenant>` ended, by partition: every reply to this batch lies behind.
    replies: dict[int, int]

    @property
    def prefix(self) -> str:
        """What the job ids of this batch begin with. The same file run again later is another batch."""
        place = json.dumps([self.input, self.tenant, sorted(self.replies.items())])
        return f"batch-{digest_of(place.encode())[7:23]}-"

    def job_id(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def number_of(self, job_id: str) -> int | None:
        """The line of one of this batch's job ids."""
        tail = job_id.removeprefix(self.prefix)
        return int(tail) if tail != job_id and tail.isascii() and tail.isdigit() else None

    @staticmethod
    def path(out: Path) -> Path:
        return out.with_name(f"{out.name}.state.json")

    @classmethod
    def load(cls, out: Path) -> Self | None:
        """None where no batch was begun. Raises BatchRefused."""
        path = cls.path(out)
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise BatchRefused(f"{path} is not the state of a batch of this version") from error

    def save(self, out: Path) -> None:
        write_private(self.path(out), self.model_dump_json(indent=1).encode())


class Results:
    """The output and error files of one run, held alone, and the lines that lie in them."""

    def __init__(self, out: Path, errors: Path, state: State) -> None:
        self.done: set[int] = set()
        self.completed = 0
        self.codes: Counter[str] = Counter()
        self.usage = Usage()
        self._state = state
        with ExitStack() as opened:
            self._out = opened.enter_context(_opened(out))
            self._errors = opened.enter_context(_opened(errors))
            self._recover(self._out, out)
            self._recover(self._errors, errors)
            self._held = opened.pop_all()

    def close(self) -> None:
        self._held.close()

    def add(self, number: int, completed: bool, line: dict[str, Any]) -> None:
        """Append one line to the file it belongs in; with the system before this returns."""
        file = self._out if completed else self._errors
        file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n")
        file.flush()
        self._count(number, line)

    def _count(self, number: int, line: dict[str, Any]) -> None:
        self.done.add(number)
        status = (line.get("response") or {}).get("status_code")
        if status == 200:
            used = usage_of(line)
            self.completed += 1
            self.usage = Usage(
                prompt_tokens=self.usage.prompt_tokens + used.prompt_tokens,
                completion_tokens=self.usage.completion_tokens + used.completion_tokens,
            )
            return
        error = line.get("error") or line["response"]["body"]["error"]
        self.codes[str(error["code"])] += 1

    def _recover(self, file: BinaryIO, path: Path) -> None:
        """Count the whole lines and cut off what follows them."""
        end = 0
        file.seek(0)
        for content in file:
            if not content.endswith(b"\n"):
                break
            self._count_kept(content, path)
            end += len(content)
        file.truncate(end)
        file.seek(end)

    def _count_kept(self, content: bytes, path: Path) -> None:
        try:
            line = json.loads(content)
            number = self._state.number_of(str(line["id"]).removeprefix("batch_req_"))
        except (ValueError, KeyError, TypeError) as error:
            raise BatchRefused(f"{path} holds a line that is no answer of a batch") from error
        if number is None or number in self.done:
            raise BatchRefused(f"{path} holds lines of another batch; choose other names")
        self._count(number, line)


def _opened(path: Path) -> BinaryIO:
    try:
        path.touch(exist_ok=True)
        file = path.open("r+b")
    except OSError as error:
        raise BatchRefused(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BatchRefused(f"another program is writing {path} now") from error
    return file
