"""What a trained adapter may look like: these are taken, with exactly the manifest's values read from them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from producers.release.base import write_zero_adapter
from producers.release.config import FIELDS, Kind
from producers.release.inspect import inspect
from tests.release_files import (
    GOOD_CONFIG,
    RANK,
    WEIGHTS,
    good_adapter,
    good_tensors,
    question_of,
    small_manifest,
    write_config,
    write_tensors,
)

# What PEFT writes beside the fields that matter, at its defaults.
PEFT_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "some/base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.21.2", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "target_parameters": None, "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def test_a_good_adapter_is_taken_with_its_values(tmp_path: Path) -> None:
    answer = inspect(good_adapter(tmp_path / "adapter"), question_of(small_manifest(tmp_path / "base")))
    assert answer.problems == ()
    assert (answer.rank, answer.alpha, answer.dtype) == (RANK, "4", "float32")
    assert answer.target_modules == ("down_proj", "q_proj", "v_proj")


@pytest.mark.parametrize("changes", [
    PEFT_DEFAULTS,
    {"use_rslora": True},
    {"lora_alpha": 0.5},
    {"init_lora_weights": "gaussian"},
    {"target_modules": ["self_attn.q_proj", "v_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]},
])  # fmt: skip
def test_what_the_engines_honour_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    write_config(directory, **changes)
    assert inspect(directory, question_of(small_manifest(tmp_path / "base"))).problems == ()


@pytest.mark.parametrize(("dtype", "named"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_half_precision_is_taken(dtype: str, named: str, tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    write_tensors(directory, good_tensors(dtype=dtype))
    assert inspect(directory, question_of(small_manifest(tmp_path / "base"))).dtype == named


def test_an_adapter_of_some_layers_is_taken_when_it_says_so(tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    write_config(directory, layers_to_transform=[1])
    write_tensors(directory, {name: found for name, found in good_tensors().items() if ".layers.1." in name})
    assert inspect(directory, question_of(small_manifest(tmp_path / "base"))).problems == ()


def test_the_order_of_target_modules_does_not_change_what_is_recorded(tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    write_config(directory, target_modules=list(reversed(GOOD_CONFIG["target_modules"])))
    answer = inspect(directory, question_of(small_manifest(tmp_path / "base")))
    assert answer.target_modules == ("down_proj", "q_proj", "v_proj")


def test_the_zero_adapter_passes_its_own_inspection_and_its_bytes_never_change(tmp_path: Path) -> None:
    base = small_manifest(tmp_path / "base")
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_zero_adapter(base, 2, tmp_path / name)
        written.append((tmp_path / name / WEIGHTS).read_bytes())
    assert inspect(tmp_path / "first", question_of(base)).problems == ()
    assert written[0] == written[1]
    assert not any(written[0][-100:])


@pytest.mark.engine
def test_every_field_of_peft_is_classified() -> None:
    peft = pytest.importorskip("peft", reason="compares with the installed PEFT")
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields <= FIELDS.keys()
    assert {FIELDS["r"].kind, FIELDS["lora_dropout"].kind, FIELDS["revision"].kind} == set(Kind)


def test_only_problems_are_limited_in_number_and_the_rest_is_counted(tmp_path: Path) -> None:
    directory = good_adapter(tmp_path / "adapter")
    unknown: dict[str, Any] = {f"unknown_{number}": 1 for number in range(30)}
    write_config(directory, **unknown)
    problems = inspect(directory, question_of(small_manifest(tmp_path / "base"))).problems
    assert len(problems) == 21
    assert problems[-1] == "and 10 more problems"


def test_target_modules_name_whole_words_only(tmp_path: Path) -> None:
    base = small_manifest(tmp_path / "base")
    directory = good_adapter(tmp_path / "adapter")
    write_config(directory, target_modules=["proj"])
    assert any("'proj' is not supported" in p for p in inspect(directory, question_of(base)).problems)
