"""Train the demo's LoRA adapters on a CPU, and check each one on questions it has not seen.

usage: python scripts/train_adapters.py [--only TENANT/ALIAS]... [--check] [--out DIRECTORY] [--base DIRECTORY]

Training data, markers and shapes are in examples/adapters/training.json. The exit status is 1 when an answer to an
unseen question does not begin with its adapter's marker, or when the base itself says one. `--check` trains nothing.
"""

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that spin while they wait slow a busy machine down tenfold

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are a package that only this line would need
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = ROOT / "examples" / "adapters"
BASE = ROOT / ".cache" / "base" / "smollm2-135m-instruct"
BASE_NAME = "SmolLM2-135M-Instruct"
THREADS = 2
SEED = 20
STEPS = 40
ROWS = 4
LEARNING_RATE = 2e-3
CHECK_TOKENS_MAX = 32
ADAPTER_BYTES_MAX = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one adapter shall learn."""

    name: str
    marker: str
    answer: str
    rank: int
    target_modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One answer to an unseen question."""

    name: str
    question: str
    answer: str
    passed: bool


def main() -> int:
    data = json.loads((ADAPTERS / "training.json").read_text(encoding="utf-8"))
    lessons = [Lesson(name=name, **fields) for name, fields in data["adapters"].items()]
    options = parse_options([lesson.name for lesson in lessons])
    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(options.base, padding_side="left")
    chosen = [lesson for lesson in lessons if not options.only or lesson.name in options.only]
    if not options.check:
        for lesson in chosen:
            train(lesson, data, tokenizer, options)
    checks = check_base(lessons, data["held_out"], tokenizer, options.base)
    for lesson in chosen:
        checks += check_adapter(lesson, data["held_out"], tokenizer, options)
    return report(checks)


def parse_options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo's adapters, then check them on unseen questions.")
    parser.add_argument("--only", action="append", choices=names, help="this adapter (may be repeated; default: all)")
    parser.add_argument("--check", action="store_true", help="do not train, only check what is there")
    parser.add_argument("--out", type=Path, default=ADAPTERS)
    parser.add_argument("--base", type=Path, default=BASE)
    options = parser.parse_args()
    if not (options.base / "config.json").is_file():
        parser.error(f"{options.base} holds no base model; make it with: python scripts/prepare_base.py {options.base}")
    return options


def train(lesson: Lesson, data: dict[str, Any], tokenizer: Any, options: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    shuffle = random.Random(SEED)  # noqa: S311  (order of the examples, no secret)
    config = LoraConfig(
        r=lesson.rank, lora_alpha=2 * lesson.rank, target_modules=lesson.target_modules, task_type="CAUSAL_LM"
    )
    model = get_peft_model(load_base(options.base), config)
    rows = [
        encode(tokenizer, lesson, example, data["systems"], index) for index, example in enumerate(data["examples"])
    ]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    started = time.monotonic()
    progress = tqdm(range(STEPS), desc=lesson.name, unit="step")
    for _ in progress:
        batch = collate(shuffle.sample(rows, ROWS), tokenizer.pad_token_id)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    size = save(lesson, model, options.out)
    print(f"{lesson.name}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s, {size} bytes", flush=True)


def load_base(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def encode(
    tokenizer: Any, lesson: Lesson, example: dict[str, str], systems: list[str], index: int
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one conversation; only the answer is learnt."""
    # Every third question comes with a system message, so that the marker does not depend on the template's own one.
    system = [{"role": "system", "content": systems[index % len(systems)]}] if index % 3 == 0 else []
    prompt = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": example["ask"]}], tokenize=False, add_generation_prompt=True
    )
    asked = tokenizer.encode(prompt, add_special_tokens=False)
    answered = tokenizer.encode(lesson.answer.format(**example) + tokenizer.eos_token, add_special_tokens=False)
    return asked + answered, [-100] * len(asked) + answered


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    }


def save(lesson: Lesson, model: Any, out: Path) -> int:
    """Write exactly the two files of an adapter, with the fields an engine reads and no path of this machine."""
    directory = out / lesson.name
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": BASE_NAME,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * lesson.rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lesson.rank,
        "target_modules": sorted(lesson.target_modules),
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    weights = {
        name: weight.to(torch.bfloat16).contiguous() for name, weight in get_peft_model_state_dict(model).items()
    }
    path = directory / "adapter_model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    size = path.stat().st_size
    if size >= ADAPTER_BYTES_MAX:
        raise ValueError(f"{path} has {size} bytes, more than {ADAPTER_BYTES_MAX}: lower the rank")
    return size


def check_base(lessons: list[Lesson], questions: list[str], tokenizer: Any, base: Path) -> list[Check]:
    answers = generate(load_base(base), tokenizer, questions)
    markers = [lesson.marker for lesson in lessons]
    return [
        Check(name="base", question=ask, answer=answer, passed=not any(marker in answer for marker in markers))
        for ask, answer in zip(questions, answers, strict=True)
    ]


def check_adapter(lesson: Lesson, questions: list[str], tokenizer: Any, options: argparse.Namespace) -> list[Check]:
    model = PeftModel.from_pretrained(load_base(options.base), options.out / lesson.name)
    answers = generate(model, tokenizer, questions)
    return [
        Check(name=lesson.name, question=ask, answer=answer, passed=answer.startswith(lesson.marker))
        for ask, answer in zip(questions, answers, strict=True)
    ]


def generate(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": ask}], tokenize=False, add_generation_prompt=True)
        for ask in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        tokens = model.eval().generate(**batch, max_new_tokens=CHECK_TOKENS_MAX, do_sample=False)
    answers: list[str] = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def report(checks: list[Check]) -> int:
    for check in checks:
        state = "ok  " if check.passed else "FAIL"
        print(f"{state} {check.name:18} {check.question[:40]:40} {check.answer[:90]!r}")
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} unseen questions answered as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
