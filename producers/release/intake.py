"""From a directory that somebody hands in to a stored, digested artifact: list, copy, inspect, hash, store."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from infra.artifacts import copy_files, hash_file, listing
from infra.objects import Objects
from infra.sandbox import SandboxFailed, run_module
from producers.release.inspect import Answer, Question
from producers.release.scan import BYTES_MAX, listing_problems
from schemas.adapters import FileEntry
from schemas.errors import SwitchyardError

# Named in every admission: which rules the adapter passed. Raise it when they change.
VALIDATOR = "switchyard-validator/1"


class Refused(SwitchyardError):
    """The adapter was refused."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the adapter was refused:\n" + "\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


@asynccontextmanager
async def inspected(directory: Path, question: Question) -> AsyncIterator[tuple[Path, Answer]]:
    """A private copy of an adapter's files and what the inspection says of them. Raises Refused.

    The copy is inspected, hashed and stored: a directory that changes meanwhile changes nothing.
    """
    entries = await asyncio.to_thread(listing, directory)
    problems = list(listing_problems(entries))
    if problems:
        raise Refused(problems)
    with tempfile.TemporaryDirectory(prefix="switchyard-") as folder:
        copy = Path(folder)
        for entry in entries:
            await asyncio.to_thread(copy_files, directory, copy, (entry.name,), BYTES_MAX[entry.name])
        answer = await _ask(copy, question)
        if answer.problems:
            raise Refused(list(answer.problems))
        yield copy, answer


async def hashed(directory: Path) -> tuple[FileEntry, ...]:
    paths = await asyncio.to_thread(lambda: sorted(directory.iterdir()))
    return tuple([await asyncio.to_thread(hash_file, path) for path in paths])


async def store(objects: Objects, directory: Path, files: tuple[FileEntry, ...], manifest: bytes) -> None:
    """Files first: whoever finds the manifest finds them."""
    for entry in files:
        stored = await objects.put(directory / entry.path)
        assert stored == entry.sha256, "our own copy changed while it was stored"
    await objects.put(manifest)


async def _ask(directory: Path, question: Question) -> Answer:
    output = await run_module("producers.release.inspect", (str(directory),), question.model_dump_json().encode())
    try:
        return Answer.model_validate_json(output)
    except ValidationError as error:
        raise SandboxFailed("the inspection gave no answer") from error
