"""Which engine a process runs, and what is known about that exact build."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from consumers.engines.engine import SlotEngine
from consumers.engines.fake import FakeEngine
from consumers.engines.protocol import Device, Engine, EngineBuild, EngineDead, EngineKind, EngineSettings
from consumers.engines.thread import ThreadBackend
from consumers.engines.vllm import VllmCore
from consumers.engines.vllm_async import AsyncVllmBackend

BUILDS = Path(__file__).with_name("builds.json")


def default_kind(device: Device) -> EngineKind:
    """vLLM in this process on a CPU, where it starts fast and survives faults; in its own processes on a GPU."""
    return "vllm" if device == "cpu" else "vllm-async"


def build_id(kind: EngineKind, device: Device) -> str:
    """Names the code that computes. Reads package metadata only."""
    if kind == "fake":
        return "fake 1"
    engine = ("peft", "transformers") if kind == "peft" else ("vllm",)
    return " ".join(
        [*(f"{name} {found}" for package in (*engine, "torch") for name, found in [_found(package)]), device]
    )


def engine_environment() -> dict[str, str]:
    """What the libraries read only from the environment. The process applies it (infra) before it starts an engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Without it vLLM does not notice NaN at all.
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    }


def describe(kind: EngineKind, settings: EngineSettings) -> EngineBuild:
    """An unknown build does not mix adapters until the contract test has shown that it does."""
    name = build_id(kind, settings.device)
    known = json.loads(BUILDS.read_text(encoding="utf-8"))
    return EngineBuild(
        id=name,
        mixes_adapters=known.get(name, {}).get("mixes_adapters", False),
        slots=settings.slots,
        rows=settings.rows,
        rank_max=settings.rank_max,
        context_max=settings.context_max,
        host_bytes=settings.host_bytes,
        copies_max=settings.copies_max,
    )


def make_engine(kind: EngineKind, settings: EngineSettings) -> Engine:
    """The engine, not started. Its library is imported here or in `start`, never before."""
    build = describe(kind, settings)
    if kind == "fake":
        return FakeEngine(build, settings)
    if kind == "peft":
        from consumers.engines.peft import PeftCore

        return SlotEngine(ThreadBackend(PeftCore(settings)), build, settings)
    backend = AsyncVllmBackend(settings) if kind == "vllm-async" else ThreadBackend(VllmCore(settings))
    return SlotEngine(backend, build, settings)


def _found(package: str) -> tuple[str, str]:
    """The installed name and version; vLLM for CPUs is a package of its own."""
    for name in (package, f"{package}-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise EngineDead(f"the package {package} is not installed")
