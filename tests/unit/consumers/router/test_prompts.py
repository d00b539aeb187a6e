"""Prompts counted in a process of their own, that one bad template or prompt cannot hold up."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from consumers.router.counting import Base, Uncountable
from consumers.router.prompts import ONE_S, TOO_SLOW, NotCountable, Tokens, Words
from infra.artifacts import hash_file
from infra.objects import FileObjects, Objects, ObjectStoreDown
from schemas.adapters import BaseManifest
from schemas.digest import digest_of
from schemas.jobs import JobSubmitted, Message
from tests.factories import make_base, make_job

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
# Loops that no limit of the template engine itself ends in time.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def write_base(directory: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer of words, which adds a special token to plain text."""
    directory.mkdir(parents=True)
    words = ["<s>", "?", "user", "system", "assistant", "hello", "there"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def manifest_of(directory: Path, objects: FileObjects) -> BaseManifest:
    paths = files_in(directory)
    for path in paths:
        await objects.put(path)
    files = tuple(hash_file(path) for path in paths)
    update = {"files": files, "tokenizer": digest_of(str(directory).encode())}
    return make_base().manifest.model_copy(update=update)


def chat(*contents: str) -> JobSubmitted:
    return make_job(prompt=None, messages=tuple(Message(role="user", content=content) for content in contents))


@pytest.fixture
async def objects(tmp_path: Path) -> FileObjects:
    (tmp_path / "objects").mkdir()
    return FileObjects(tmp_path / "objects")


@pytest.fixture
async def tokens(objects: FileObjects, tmp_path: Path) -> AsyncIterator[Tokens]:
    counter = Tokens(objects, tmp_path / "cache", Words())
    yield counter
    await counter.stop()


async def test_prompts_and_messages_are_counted_as_the_engine_does(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    base = await manifest_of(write_base(tmp_path / "base"), objects)
    jobs = [make_job(prompt="hello there"), chat("hello"), chat("hello", "there")]
    assert await tokens.count(base, jobs) == [3, 3, 5]
    assert await tokens.count(base, []) == []


async def test_an_endless_template_costs_its_own_prompts_and_nobody_elses(
    tokens: Tokens, objects: FileObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.router.prompts.PART_S", ONE_S)
    bad = await manifest_of(write_base(tmp_path / "bad", ENDLESS), objects)
    good = await manifest_of(write_base(tmp_path / "good"), objects)
    assert await tokens.count(bad, [make_job(prompt="hello there"), chat("hello")]) == [3, TOO_SLOW]
    assert await tokens.count(good, [chat("hello")]) == [3]


async def test_a_template_that_refuses_or_writes_without_end_gives_a_sentence(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    refusing = await manifest_of(write_base(tmp_path / "no", "{{ raise_exception('no such role') }}"), objects)
    much = "{% for a in range(99999) %}" + "x" * 999 + "{% endfor %}"
    writing = await manifest_of(write_base(tmp_path / "much", much), objects)
    (said,) = await tokens.count(refusing, [chat("hello")])
    assert "no such role" in str(said)
    assert await tokens.count(writing, [chat("hello")]) == ["the rendered prompt is too long"]


async def test_a_tokenizer_that_cannot_be_read_counts_nothing(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base")
    (directory / "tokenizer.json").write_text('{"model": "none"}')
    with pytest.raises(NotCountable, match="cannot be read"):
        await tokens.count(await manifest_of(directory, objects), [make_job()])
    good = await manifest_of(write_base(tmp_path / "good"), objects)
    assert await tokens.count(good, [make_job(prompt="hello")]) == [2]


async def test_without_a_tokenizer_nothing_is_counted_unless_words_were_asked_for(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    base = make_base().manifest
    assert await tokens.count(base, [make_job(prompt="one two three")]) == [3]
    with pytest.raises(NotCountable, match=r"no tokenizer\.json"):
        await Tokens(objects, tmp_path / "cache").count(base, [make_job()])


async def test_files_that_are_not_those_of_the_base_count_nothing(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base")
    base = await manifest_of(directory, objects)
    for entry in base.files:
        stored = objects._path(entry.sha256)
        stored.chmod(0o600)
        stored.write_bytes(b"{}")
    with pytest.raises(NotCountable):
        await tokens.count(base, [make_job()])


def test_a_base_without_a_template_takes_prompts_alone(tmp_path: Path) -> None:
    directory = write_base(tmp_path / "base")
    (directory / "tokenizer_config.json").unlink()
    base = Base(directory)
    assert base.count("hello") == 2
    with pytest.raises(Uncountable, match="no chat template"):
        base.count([{"role": "user", "content": "hello"}])


class Away:
    """An object store that says that it is down, or says nothing."""

    def __init__(self, silent: bool = False) -> None:
        self.asked = 0
        self._silent = silent

    async def fetch(self, *_: object, **__: object) -> None:
        self.asked += 1
        if self._silent:
            await asyncio.Event().wait()
        raise ObjectStoreDown


async def test_with_the_store_away_what_was_fetched_once_still_counts_and_nothing_else(
    tokens: Tokens, objects: FileObjects, tmp_path: Path
) -> None:
    known = await manifest_of(write_base(tmp_path / "known"), objects)
    new = await manifest_of(write_base(tmp_path / "new", TEMPLATE + " "), objects)
    assert await tokens.count(known, [make_job(prompt="hello")]) == [2]
    away = Away()
    later = Tokens(cast("Objects", away), tmp_path / "cache")
    assert await later.count(known, [make_job(prompt="hello")]) == [2]
    for _ in range(3):
        with pytest.raises(NotCountable, match="cannot be fetched"):
            await later.count(new, [make_job()])
    assert away.asked == 1, "a store that is away is not asked for every job"
    await later.stop()


async def test_a_store_that_says_nothing_holds_everybody_up_once_and_briefly(
    objects: FileObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.router.prompts.FETCH_S", 0.05)
    base = await manifest_of(write_base(tmp_path / "base"), objects)
    away = Away(silent=True)
    counter = Tokens(cast("Objects", away), tmp_path / "cache")
    for _ in range(3):
        with pytest.raises(NotCountable, match="does not answer"):
            await counter.count(base, [make_job()])
    assert away.asked == 1
    await counter.stop()


async def test_a_tokenizer_that_could_not_be_had_is_asked_for_again_later(
    objects: FileObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.router.prompts.FETCH_AGAIN_S", 0.0)
    base = await manifest_of(write_base(tmp_path / "base"), objects)
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    counter = Tokens(objects, tmp_path / "cache")
    with pytest.raises(NotCountable, match="cannot be fetched"):
        await counter.count(base, [make_job(prompt="hello")])
    (tmp_path / "elsewhere").rename(tmp_path / "objects")
    async with asyncio.timeout(10):
        while True:
            try:
                found = await counter.count(base, [make_job(prompt="hello")])
                break
            except NotCountable:
                await asyncio.sleep(0)
    assert found == [2]
    await counter.stop()
