"""The router counts a prompt's tokens as the engine's own tokenizer does."""

from pathlib import Path

import pytest

from consumers.engines.text import BaseText
from consumers.router.counting import Base
from schemas.jobs import Message
from tests.bench.real import BASE
from tests.models import tiny_base

pytestmark = [pytest.mark.engine]

CONTEXT_MAX = 4096
TEXTS = ["Hello?", "", " \n\n  x", "Grüße aus Köln, 你好 🙂", "<|im_start|>system\nyou are", "a" * 500, "\u202etxet"]


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_a_count_is_the_engines_own(which: str, tmp_path: Path) -> None:
    directory = tiny_base(tmp_path / "base") if which == "tiny" else BASE
    engine, router = BaseText(directory, CONTEXT_MAX), Base(directory)
    for text in filter(None, TEXTS):
        assert router.count(text) == len(engine.encode(text)), text
    for chat in (TEXTS[:1], TEXTS[:3], TEXTS):
        roles = ["system", *["user", "assistant"] * len(chat)]
        messages = [Message.model_validate({"role": r, "content": c}) for r, c in zip(roles, chat, strict=False)]
        assert router.count([m.model_dump(mode="json") for m in messages]) == len(engine.encode(messages))
