"""Counts prompt tokens, in a process that can do little: `python -m infra.sandbox LIMITS consumers.router.counting`.

A chat template is a program that came with a base model, and a tokenizer a parser of what a tenant sent; neither runs
in the router. Questions and answers are JSON after four bytes of length: a base's directory and prompts, then counts.
"""

import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

LENGTH_BYTES = 4
# A template may write what it likes; more than this is no prompt.
RENDERED_CHARS_MAX = 8 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Uncountable(Exception):
    """Why one prompt has no count, in words for its tenant."""


class Base:
    """One base's tokenizer and chat template, from the files that its digest names."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # What the file asks for in training would make every long prompt count as a short one.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = directory / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(settings.read_bytes()) if settings.exists() else {}
        lone = directory / "chat_template.jinja"
        source = lone.read_text() if lone.exists() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        self._template = _environment().from_string(source) if isinstance(source, str) else None
        self._tokens = {name: _text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}

    def count(self, prompt: Any) -> int:
        """Tokens of a text, or of messages in the chat template. `Any` because JSON is. Raises Uncountable."""
        if isinstance(prompt, str):
            return len(self._tokenizer.encode(prompt, add_special_tokens=True))
        return len(self._tokenizer.encode(self._rendered(prompt), add_special_tokens=False))

    def _rendered(self, messages: Any) -> str:
        if self._template is None:
            raise Uncountable("the base has no chat template; send 'prompt' instead of 'messages'")
        text, parts = 0, []
        values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **self._tokens}
        try:
            for part in self._template.generate(values):
                text += len(part)
                parts.append(part)
                if text > RENDERED_CHARS_MAX:
                    raise Uncountable("the rendered prompt is too long")
        except (TemplateError, TypeError, ValueError) as error:
            raise Uncountable(f"the base's chat template refuses these messages: {error}") from error
        return "".join(parts)


class _Generation(Extension):  # type: ignore[misc]  # the library is not followed
    """Templates mark what the assistant said. The mark writes nothing."""

    tags = {"generation"}  # noqa: RUF012  as the class above declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders chat templates: the same names mean the same."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": time.strftime}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _text(token: Any) -> str:
    """A special token is a text, or a record with one."""
    return str(token["content"] if isinstance(token, dict) else token)


@cache
def base_in(directory: str) -> Base:
    return Base(Path(directory))


def answer(question: dict[str, Any]) -> list[int | str]:
    """For every prompt its count, or why there is none."""
    base = base_in(question["base"])
    found: list[int | str] = []
    for prompt in question["prompts"]:
        try:
            found.append(base.count(prompt))
        except Uncountable as error:
            found.append(str(error)[:300])
    return found


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more questions."""
    while length := questions.read(LENGTH_BYTES):
        content = json.dumps(answer(json.loads(questions.read(int.from_bytes(length, "big"))))).encode()
        answers.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
