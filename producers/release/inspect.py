"""`python -m producers.release.inspect DIRECTORY`: read an adapter's files and say what is wrong with them.

Runs in `infra.sandbox`. The question comes on standard input, the answer leaves on standard output, both as JSON.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from producers.release.config import BadConfig, adapter_config, config_problems, read_config
from producers.release.scan import CONFIG, HEAD_BYTES, README, WEIGHTS, head_problem
from producers.release.tensors import (
    ADAPTER_HEADER_BYTES_MAX,
    LENGTH_BYTES,
    BadTensors,
    Tensor,
    header_bytes,
    magnitude,
    parse_header,
)
from producers.release.validate import DTYPES, adapter_problems, value_problem
from schemas.ids import Count
from schemas.record import Value

# What is read of a tensor at once; a multiple of every item's size.
CHUNK_BYTES = 4 << 20
PROBLEMS_MAX = 20


class Question(Value):
    """What the adapter is held against."""

    modules: dict[str, tuple[Count, Count]]
    rank_max: int


class Answer(Value):
    """The problems found; without any, what the manifest needs."""

    problems: tuple[str, ...]
    rank: int = 0
    alpha: str = ""
    target_modules: tuple[str, ...] = ()
    dtype: str = ""


def inspect(directory: Path, question: Question) -> Answer:
    """Check contents file by file. Later checks need the earlier ones to have passed."""
    problems = list(_head_problems(directory))
    if problems:
        return _refusal(problems)
    try:
        document = read_config((directory / CONFIG).read_bytes())
    except BadConfig as error:
        return _refusal([f"file '{CONFIG}': {error}"])
    problems = [f"file '{CONFIG}': {problem}" for problem in config_problems(document)]
    if problems:
        return _refusal(problems)
    config = adapter_config(document)
    with (directory / WEIGHTS).open("rb") as file:
        try:
            tensors, data_start = read_header(file, ADAPTER_HEADER_BYTES_MAX)
        except BadTensors as error:
            return _refusal([f"file '{WEIGHTS}': {error}"])
        problems = list(adapter_problems(config, tensors, question.modules, question.rank_max))
        if not problems:
            problems = list(_value_problems(file, data_start, tensors))
    if problems:
        return _refusal(problems)
    return Answer(
        problems=(),
        rank=config.rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        dtype=DTYPES[tensors[0].dtype],
    )


def read_header(file: BinaryIO, bytes_max: int) -> tuple[tuple[Tensor, ...], int]:
    """The tensors of an open safetensors file, and where their bytes begin. Raises BadTensors."""
    size = file.seek(0, 2)
    file.seek(0)
    length = header_bytes(file.read(LENGTH_BYTES), size, bytes_max)
    start = LENGTH_BYTES + length
    return parse_header(file.read(length), size - start), start


def _head_problems(directory: Path) -> Iterator[str]:
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            problem = head_problem(path.name, file.read(HEAD_BYTES))
        if problem:
            yield problem
    try:
        if (directory / README).exists():
            (directory / README).read_text("utf-8")
    except UnicodeDecodeError:
        yield f"file '{README}': it is not UTF-8 text"


def _value_problems(file: BinaryIO, data_start: int, tensors: tuple[Tensor, ...]) -> Iterator[str]:
    for tensor in tensors:
        file.seek(data_start + tensor.start)
        for begin in range(tensor.start, tensor.end, CHUNK_BYTES):
            chunk = file.read(min(CHUNK_BYTES, tensor.end - begin))
            problem = value_problem(tensor, magnitude(chunk, tensor.dtype))
            if problem:
                yield problem
                break


def _refusal(problems: list[str]) -> Answer:
    more = len(problems) - PROBLEMS_MAX
    return Answer(problems=(*problems[:PROBLEMS_MAX], *([f"and {more} more problems"] if more > 0 else [])))


if __name__ == "__main__":
    answer = inspect(Path(sys.argv[1]), Question.model_validate_json(sys.stdin.buffer.read()))
    sys.stdout.write(answer.model_dump_json())
