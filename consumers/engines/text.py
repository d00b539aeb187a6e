"""Text and tokens: prompts through the base's tokenizer and chat template, answers up to their stop strings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consumers.engines.protocol import PromptInvalid, PromptTooLong
from schemas.jobs import Message


def check_prompt(ids: Sequence[int], context_max: int) -> tuple[int, ...]:
    if not ids:
        raise PromptInvalid
    if len(ids) >= context_max:
        raise PromptTooLong(f"the prompt has {len(ids)} tokens and the context {context_max}, the answer included")
    return tuple(ids)


class BaseText:
    """The tokenizer and chat template of a base model."""

    def __init__(self, base_dir: Path, context_max: int) -> None:
        from transformers import AutoTokenizer

        # Any: transformers chooses the tokenizer's class at run time.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base_dir, local_files_only=True, trust_remote_code=False)
        self._context_max = context_max
        # No token is longer, so a longer text need not be tokenized to know that it does not fit.
        self._chars_max = context_max * max(len(token) for token in self.tokenizer.get_vocab())

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        text, special = (prompt, True) if isinstance(prompt, str) else (self._render(prompt), False)
        if len(text) > self._chars_max:
            raise PromptTooLong(f"the prompt has {len(text)} characters; no more than {self._chars_max} can fit")
        return check_prompt(self.tokenizer(text, add_special_tokens=special)["input_ids"], self._context_max)

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        turns = [message.model_dump() for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise PromptInvalid(f"the base's chat template refuses these messages: {error}") from error
        return text


class Stops:
    """Cuts a stream of text before the first stop string, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.met = False

    def push(self, text: str, last: bool) -> str:
        """The text that is safe to show now."""
        self._held += text
        cuts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.met = bool(cuts)
        shown = min(cuts) if cuts else len(self._held) - (0 if last else self._held_back())
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def _held_back(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        lengths = range(min(len(self._held), max(map(len, self._stops), default=0)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
