"""How many tokens the prompts of jobs have: asked of a process that can be killed, part by part."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from infra.artifacts import ArtifactBroken, fetch_files
from infra.logs import ActionLog
from infra.objects import ObjectCorrupt, Objects, ObjectStoreDown, ObjectUnknown
from infra.sandbox import Limits, SandboxFailed, Servant
from schemas.adapters import BaseManifest
from schemas.jobs import JobSubmitted

log = ActionLog("router")

START_S = 60.0
# What a part of a hundred prompts may take, and one prompt alone.
PART_S = 5.0
ONE_S = 2.0
# How long everybody waits for a tokenizer that is fetched for the first time; its own base waits for the rest of it.
FETCH_S = 2.0
# How long a store that did not give one is not asked again.
FETCH_AGAIN_S = 5.0
LIMITS = Limits(memory_bytes=4 << 30, cpu_seconds=1 << 30, output_bytes=1 << 20)
# Whose content decides how a text becomes tokens.
TOKENIZER_FILES = frozenset({
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
})  # fmt: skip
TOO_SLOW = "the prompt could not be counted in time"

# A number of tokens, or why there is none.
Count = int | str


class NotCountable(Exception):
    """Prompts of this base cannot be counted now: nothing of it is admitted."""


class Counter(Protocol):
    """Counts prompts as the base's engine will."""

    async def count(self, base: BaseManifest, jobs: Sequence[JobSubmitted]) -> list[Count]:
        """For every job its prompt's tokens, or a sentence for its tenant. Raises NotCountable."""

    async def stop(self) -> None:
        """Leave no process behind."""


class Words:
    """As the fake engine, whose bases have no tokenizer."""

    async def count(self, base: BaseManifest, jobs: Sequence[JobSubmitted]) -> list[Count]:
        del base
        return [sum(len(turn.split()) for turn in _turns(job)) for job in jobs]

    async def stop(self) -> None:
        return


class Tokens:
    """By each base's own tokenizer, whose files come from the object store and are hashed."""

    def __init__(self, objects: Objects, cache: Path, without: Counter | None = None) -> None:
        """`without` counts for bases that have no tokenizer; None: nothing of them is admitted."""
        self._without = without
        self._objects = objects
        self._cache = cache
        self._servant = Servant("consumers.router.counting", LIMITS)
        self._places: dict[str, Path] = {}
        self._fetching: dict[str, asyncio.Task[Path]] = {}
        # Which tokenizers which life of the process has read.
        self._warm: set[tuple[int, Path]] = set()
        # One question at a time: the answers come in the order of the questions.
        self._asking = asyncio.Lock()

    async def count(self, base: BaseManifest, jobs: Sequence[JobSubmitted]) -> list[Count]:
        if self._without is not None and not _has_tokenizer(base):
            return await self._without.count(base, jobs)
        place = await self._place(base)
        prompts = [_prompt(job) for job in jobs]
        async with self._asking:
            try:
                return await self._ask(place, prompts, PART_S)
            except SandboxFailed as error:
                log.warning("prompts.uncounted", prompts=len(prompts), detail=str(error))
            # One of them is to blame: each alone, and only it is refused.
            return [await self._alone(place, prompt) for prompt in prompts]

    async def stop(self) -> None:
        for fetching in self._fetching.values():
            fetching.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
        await self._servant.stop()

    async def _alone(self, place: Path, prompt: Any) -> Count:
        try:
            return (await self._ask(place, [prompt], ONE_S))[0]
        except SandboxFailed:
            return TOO_SLOW

    async def _ask(self, place: Path, prompts: list[Any], seconds: float) -> list[Count]:
        await self._warm_up(place)
        found = await self._servant.ask({"base": str(place), "prompts": prompts}, seconds)
        if not isinstance(found, list) or len(found) != len(prompts):
            raise SandboxFailed("the counts are not those of the prompts")
        return found

    async def _warm_up(self, place: Path) -> None:
        """Starting the process, and reading a tokenizer, is no prompt's fault. Raises NotCountable."""
        if (self._servant.life, place) in self._warm:
            return
        try:
            await self._servant.ask({"base": str(place), "prompts": []}, START_S)
        except SandboxFailed as error:
            raise NotCountable(f"the base's tokenizer cannot be read: {error}") from error
        self._warm = {(life, known) for life, known in self._warm if life == self._servant.life}
        self._warm.add((self._servant.life, place))

    async def _place(self, base: BaseManifest) -> Path:
        """Where a base's tokenizer lies, fetched once. Raises NotCountable where it is not there soon."""
        if base.tokenizer not in self._places:
            if not _has_tokenizer(base):
                raise NotCountable("the base has no tokenizer.json")
            fetching = self._fetching.get(base.tokenizer)
            if fetching is None:
                fetching = self._fetching[base.tokenizer] = asyncio.create_task(self._fetch(base))
                await asyncio.wait([fetching], timeout=FETCH_S)
            if not fetching.done():
                raise NotCountable("the object store does not answer")
            self._places[base.tokenizer] = fetching.result()
        return self._places[base.tokenizer]

    async def _fetch(self, base: BaseManifest) -> Path:
        """The folder of a base's tokenizer files, each hashed. Raises NotCountable, and is forgotten a while later."""
        files = tuple(entry for entry in base.files if entry.path in TOKENIZER_FILES)
        place = self._cache / base.tokenizer.removeprefix("sha256:")
        try:
            await fetch_files(self._objects, files, place)
        except (ObjectUnknown, ObjectCorrupt, ObjectStoreDown, ArtifactBroken, OSError) as error:
            asyncio.get_running_loop().call_later(FETCH_AGAIN_S, self._fetching.pop, base.tokenizer, None)
            raise NotCountable(f"the base's tokenizer cannot be fetched: {error}") from error
        return place


def _has_tokenizer(base: BaseManifest) -> bool:
    return any(entry.path == "tokenizer.json" for entry in base.files)


def _prompt(job: JobSubmitted) -> str | list[Mapping[str, Any]]:
    return job.prompt if job.prompt is not None else [message.model_dump(mode="json") for message in job.messages or ()]


def _turns(job: JobSubmitted) -> list[str]:
    return [job.prompt] if job.prompt is not None else [f"{m.role} {m.content}" for m in job.messages or ()]
