"""The models of the tests and of the demo say what they are said to say, in PEFT and in vLLM."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.models import MARGIN_MIN, MARKERS_MAX, marker_adapter, marker_text, marker_token, tiny_base, zero_adapter

ROOT = Path(__file__).resolve().parents[2]
DEMO_BASE = ROOT / ".cache" / "base" / "smollm2-135m-instruct"
DEMO_ADAPTERS = ROOT / "examples" / "adapters"
TOKENS_MAX = 16
RANKS = {"m0": 1, "m1": 2, "m2": 4, "m7": 8, "m8": 4, "m20": 4, "m33": 4, "m63": 4}
QUESTIONS = ("hi", "What is Kafka?", "漢字 <m3>", "a river and " * 12)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    base: Path
    adapters: dict[str, Path]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One row of a batch; without an adapter it asks the base."""

    adapter: str | None
    question: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: list[int]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    base = tiny_base(root / "base")
    adapters = {name: marker_adapter(root / name, base, name, rank) for name, rank in RANKS.items()}
    return Tiny(base=base, adapters={**adapters, "zero": zero_adapter(root / "zero", base)})


@pytest.fixture(scope="module")
def mixed() -> list[Ask]:
    """Every adapter asks every question, neighbours under different adapters and of uneven lengths."""
    return [Ask(adapter=name, question=question) for question in QUESTIONS for name in ("zero", *RANKS)]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = tiny_base(tmp_path / "1"), tiny_base(tmp_path / "2"), tiny_base(tmp_path / "3", seed=1)
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_a_marker_is_named_by_number_or_text() -> None:
    assert {marker_text(name) for name in (3, "3", "m3", "<m3>")} == {"<m3>"}
    with pytest.raises(ValueError, match="is not a marker"):
        marker_text(MARKERS_MAX)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_a_marker_wins_by_a_wide_margin_in_a_mixed_batch(tiny: Tiny, mixed: list[Ask]) -> None:
    logits = peft_first_logits(tiny, mixed)
    for ask, row in zip(mixed, logits, strict=True):
        if ask.adapter in RANKS:
            token = marker_token(ask.adapter)
            assert row[token] - max(row[:token] + row[token + 1 :]) > MARGIN_MIN, ask


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_the_zero_adapter_leaves_the_base_as_it_is_and_the_base_says_no_marker(tiny: Tiny) -> None:
    zero = peft_first_logits(tiny, [Ask(adapter="zero", question=question) for question in QUESTIONS])
    base = peft_first_logits(tiny, [Ask(adapter=None, question=question) for question in QUESTIONS])
    assert zero == base
    markers = slice(marker_token(0), marker_token(MARKERS_MAX - 1) + 1)
    assert all(max(row) - max(row[markers]) > MARGIN_MIN / 2 for row in base)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_vllm_answers_a_mixed_batch_token_for_token_like_peft(tiny: Tiny, mixed: list[Ask]) -> None:
    answers = in_own_process(tiny.base, tiny.adapters, mixed, "float32")
    assert [answer.tokens for answer in answers] == peft_tokens(tiny, mixed)
    for ask, answer in zip(mixed, answers, strict=True):
        marker = marker_text(ask.adapter) if ask.adapter in RANKS else None
        assert answer.text.count("<m") == (0 if marker is None else TOKENS_MAX // 2), ask
        assert marker is None or answer.text.count(marker) == TOKENS_MAX // 2, ask


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_adapters_begin_every_answer_with_their_marker_in_vllm() -> None:
    assert DEMO_BASE.is_dir(), "the demo's base is missing; make it with: python scripts/prepare_base.py"
    training = json.loads((DEMO_ADAPTERS / "training.json").read_text(encoding="utf-8"))
    markers = {name: lesson["marker"] for name, lesson in training["adapters"].items()}
    asks = [Ask(adapter=name, question=ask) for ask in training["held_out"][:8] for name in (None, *markers)]
    answers = in_own_process(DEMO_BASE, {name: DEMO_ADAPTERS / name for name in markers}, asks, "bfloat16")
    for ask, answer in zip(asks, answers, strict=True):
        if ask.adapter is None:
            assert not any(marker in answer.text for marker in markers.values()), ask
        else:
            assert answer.text.startswith(markers[ask.adapter]), (ask, answer)


def peft_model(tiny: Tiny) -> tuple[Any, Any]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.base, padding_side="left")
    first, *others = tiny.adapters
    model = AutoModelForCausalLM.from_pretrained(tiny.base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tiny.adapters[first], adapter_name=first)
    for name in others:
        model.load_adapter(tiny.adapters[name], adapter_name=name)
    return model.eval(), tokenizer


def peft_batch(tokenizer: Any, asks: list[Ask]) -> dict[str, Any]:
    prompts = [prompt_text(tokenizer, ask.question) for ask in asks]
    batch = dict(tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False))
    return {**batch, "adapter_names": [ask.adapter or "__base__" for ask in asks]}


def peft_first_logits(tiny: Tiny, asks: list[Ask]) -> list[list[float]]:
    model, tokenizer = peft_model(tiny)
    generated = model.generate(
        **peft_batch(tokenizer, asks),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows: list[list[float]] = generated.logits[0].tolist()
    return rows


def peft_tokens(tiny: Tiny, asks: list[Ask]) -> list[list[int]]:
    model, tokenizer = peft_model(tiny)
    batch = peft_batch(tokenizer, asks)
    tokens = model.generate(**batch, max_new_tokens=TOKENS_MAX, do_sample=False)
    rows: list[list[int]] = tokens[:, batch["input_ids"].shape[1] :].tolist()
    return rows


def prompt_text(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def in_own_process(base: Path, adapters: dict[str, Path], asks: list[Ask], dtype: str) -> list[Answer]:
    """vLLM keeps process-wide state and reads the environment at import: one engine, one process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(vllm_answers, base, adapters, asks, dtype).result()


def vllm_answers(base: Path, adapters: dict[str, Path], asks: list[Ask], dtype: str) -> list[Answer]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(base),
            dtype=dtype,
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=8,
            max_model_len=512,
            max_num_seqs=64,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 28,
        )
    )
    # Base rows beside adapter rows would get the last slot's adapter on a CPU: they run alone, before any load.
    answers = run_batch(engine, {ask: None for ask in asks if ask.adapter is None})
    loras = {name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(adapters.items(), 1)}
    for lora in loras.values():
        engine.add_lora(lora)
    answers |= run_batch(engine, {ask: loras[ask.adapter] for ask in asks if ask.adapter is not None})
    return [answers[ask] for ask in asks]


def run_batch(engine: Any, loras: dict[Ask, Any]) -> dict[Ask, Answer]:
    from vllm import SamplingParams, TokensPrompt

    tokenizer = engine.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS_MAX)
    asks = {str(number): ask for number, ask in enumerate(loras)}
    for name, ask in asks.items():
        tokens = tokenizer.encode(prompt_text(tokenizer, ask.question), add_special_tokens=False)
        prompt = TokensPrompt(prompt_token_ids=tokens)
        engine.add_request(name, prompt, params, lora_request=loras[ask])
    answers: dict[Ask, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                reply = output.outputs[0]
                answers[asks[output.request_id]] = Answer(text=reply.text, tokens=list(reply.token_ids))
    return answers
