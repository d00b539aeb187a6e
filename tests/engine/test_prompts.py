"""The router counts a prompt's tokens as the engine's own tokenizer does."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

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


TEMPLATES = [
    "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}{{ messages[0] }}",
    "{% if strftime_now is defined %}it is {{ strftime_now('%d %b %Y') }}{% else %}it is then{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m|tojson(separators=(',', ':')) }}{% endfor %}",
    "{{ messages | tojson(sort_keys=true, indent=1) }}  {{ pad_token }}{{ unk_token }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_template_may_use_is_there_and_means_the_same(template: str, tmp_path: Path) -> None:
    directory = tiny_base(tmp_path / "base")
    (directory / "chat_template.jinja").write_text(template)
    engine, router = BaseText(directory, CONTEXT_MAX), Base(directory)
    messages = [
        Message(role="user", content="one"),
        Message(role="assistant", content="two <b>"),
        Message(role="user", content="three"),
    ]
    assert router.count([m.model_dump(mode="json") for m in messages]) == len(engine.encode(messages))


def test_a_tokenizer_that_was_saved_with_truncation_counts_the_whole_prompt(tmp_path: Path) -> None:
    directory = tiny_base(tmp_path / "base")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(directory / "tokenizer.json"))
    engine, router = BaseText(directory, CONTEXT_MAX), Base(directory)
    for text in ("a", "a longer prompt, of more than four tokens"):
        assert router.count(text) == len(engine.encode(text))
