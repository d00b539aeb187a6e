"""Which engine runs, what is claimed of its build, and that naming it costs nothing."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import consumers.engines
from consumers.engines import select
from consumers.engines.protocol import EngineSettings
from consumers.engines.vllm import engine_args

SETTINGS = EngineSettings(base_dir=Path("/base"), slots=3, rank_max=5)


def test_a_cpu_runs_vllm_in_this_process_and_a_gpu_in_its_own() -> None:
    assert select.default_kind("cpu") == "vllm"
    assert select.default_kind("cuda") == "vllm-async"


def test_an_unknown_build_does_not_mix_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select.describe("fake", SETTINGS).mixes_adapters
    monkeypatch.setattr(select, "build_id", lambda _kind, _device: "vllm 99 torch 99 cuda")
    build = select.describe("vllm", SETTINGS)
    assert (build.id, build.mixes_adapters, build.slots) == ("vllm 99 torch 99 cuda", False, 3)


def test_the_device_is_part_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_found", lambda package: (package, "1"))
    assert select.build_id("vllm", "cpu") == "vllm 1 torch 1 cpu"
    assert select.build_id("vllm-async", "cuda") == "vllm 1 torch 1 cuda"
    assert select.build_id("peft", "cpu") == "peft 1 transformers 1 torch 1 cpu"


def test_recorded_builds_say_whether_they_mix_adapters_and_nothing_else() -> None:
    builds = json.loads(select.BUILDS.read_text())
    assert all(list(build) == ["mixes_adapters"] for build in builds.values())


def test_importing_the_engines_imports_no_torch() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'peft'}"
    code = f"import sys, consumers.engines.select; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_vllm_is_told_everything_that_its_traps_depend_on() -> None:
    args = engine_args(SETTINGS)
    assert args["block_size"] == 32
    assert (args["max_loras"], args["max_cpu_loras"]) == (3, SETTINGS.host_adapters_max)
    assert args["max_lora_rank"] == 8
    assert args["enforce_eager"] is True
    assert args["disable_log_stats"] is False
    assert engine_args(replace(SETTINGS, device="cuda"))["enforce_eager"] is False


def test_the_environment_counts_nan_and_leaves_the_size_of_the_kv_cache_to_the_arguments() -> None:
    environment = select.engine_environment()
    assert environment["VLLM_COMPUTE_NANS_IN_LOGITS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_no_adapter_is_ever_pinned() -> None:
    sources = Path(consumers.engines.__path__[0]).glob("*.py")
    assert not [source for source in sources if "pin_lora" in source.read_text()]
