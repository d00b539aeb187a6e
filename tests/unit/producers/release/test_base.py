"""A base's identity: its files, its words, its shapes; nothing of it is run."""

import json
from pathlib import Path

import pytest

from infra.artifacts import BaseMismatch
from producers.release.base import BadBase, base_manifest
from tests.release_files import HIDDEN, INNER, small_base, small_manifest


def test_a_base_is_described_by_its_files(tmp_path: Path) -> None:
    manifest = small_manifest(tmp_path / "base")
    assert (manifest.name, manifest.layers, manifest.context_max) == ("small", 2, 128)
    assert manifest.modules["model.layers.1.mlp.down_proj"] == (INNER, HIDDEN)
    assert "model.embed_tokens" not in manifest.modules
    assert [entry.path for entry in manifest.files] == sorted(entry.path for entry in manifest.files)


def test_equal_directories_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    assert small_manifest(tmp_path / "a").digest == small_manifest(tmp_path / "b").digest


def test_another_chat_template_is_another_tokenizer_and_another_base(tmp_path: Path) -> None:
    first = small_manifest(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    second = base_manifest(tmp_path / "base", "small")
    assert first.tokenizer != second.tokenizer
    assert first.digest != second.digest


def test_files_that_no_engine_reads_do_not_change_it(tmp_path: Path) -> None:
    first = small_manifest(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("about")
    assert base_manifest(tmp_path / "base", "small") == first


def test_weights_of_the_base_need_no_adapter_dtype_but_a_strict_header(tmp_path: Path) -> None:
    directory = small_base(tmp_path / "base")
    (directory / "model.safetensors").write_bytes(b"\x80\x04pickled weights")
    with pytest.raises(BadBase, match=r"model\.safetensors: the header claims"):
        base_manifest(directory, "small")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_by_reference_is_refused(name: str, tmp_path: Path) -> None:
    directory = small_base(tmp_path / "base")
    document = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**document, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(BadBase, match=f"{name}: 'auto_map' names code"):
        base_manifest(directory, "small")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("config.json", "config.json cannot be read"),
        ("tokenizer.json", "neither tokenizer.json nor tokenizer.model"),
        ("model.safetensors", "no module that takes an adapter"),
    ],
)
def test_a_directory_that_lacks_a_part_is_refused(gone: str, said: str, tmp_path: Path) -> None:
    directory = small_base(tmp_path / "base")
    (directory / gone).unlink()
    with pytest.raises(BadBase, match=said):
        base_manifest(directory, "small")


@pytest.mark.parametrize("field", ["architectures", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_needed_field_is_refused_by_its_name(field: str, tmp_path: Path) -> None:
    with pytest.raises(BadBase, match=f"field '{field}'"):
        base_manifest(small_base(tmp_path / "base", **{field: None}), "small")


def test_a_directory_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BaseMismatch, match="cannot be read as a directory"):
        base_manifest(tmp_path / "absent", "small")
