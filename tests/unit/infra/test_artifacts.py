"""Artifacts on a disk: fetched whole, read-only and hashed at every use; bases compared file by file."""

import asyncio
import shutil
from pathlib import Path

import pytest

from infra.artifacts import ArtifactBroken, BaseMismatch, check_base, copy_files, fetch_artifact, listing
from infra.objects import OBJECT_BYTES_MAX, FileObjects, ObjectUnknown
from schemas.adapters import AdapterManifest
from schemas.digest import digest_of
from tests.factories import make_file, make_manifest
from tests.release_files import small_base, small_manifest

CONTENTS = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "README.md": b"words"}


async def stored(objects: FileObjects) -> AdapterManifest:
    for content in CONTENTS.values():
        await objects.put(content)
    files = tuple(make_file(name, content) for name, content in CONTENTS.items())
    base = digest_of(b"base")
    return make_manifest(base, base).model_copy(update={"files": files})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_an_artifact_is_fetched_read_only_without_its_readme(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path / "objects")
    manifest = await stored(objects)
    place = await fetch_artifact(objects, manifest, tmp_path / "cache")
    assert place.name == manifest.digest.removeprefix("sha256:")
    assert names(place) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (place / "adapter_model.safetensors").read_bytes() == b"weights"
    assert {path.stat().st_mode & 0o777 for path in (place, *place.glob("*"))} == {0o555, 0o444}
    assert names(tmp_path / "cache") == {place.name}


def _change(place: Path) -> None:
    path = place / "adapter_model.safetensors"
    path.chmod(0o600)
    path.write_bytes(b"WEIGHTS")


def _add(place: Path) -> None:
    (place / "evil.py").write_text("x")


def _remove(place: Path) -> None:
    (place / "adapter_config.json").unlink()


def _link(place: Path) -> None:
    path = place / "adapter_model.safetensors"
    path.rename(place.parent / "elsewhere")
    path.symlink_to(place.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [_change, _add, _remove, _link])
async def test_a_cached_artifact_that_changed_is_fetched_anew(spoil: object, tmp_path: Path) -> None:
    objects = FileObjects(tmp_path / "objects")
    manifest = await stored(objects)
    place = await fetch_artifact(objects, manifest, tmp_path / "cache")
    place.chmod(0o700)
    assert callable(spoil)
    spoil(place)
    assert await fetch_artifact(objects, manifest, tmp_path / "cache") == place
    assert names(place) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (place / "adapter_model.safetensors").read_bytes() == b"weights"


async def test_an_artifact_that_is_whole_needs_no_store(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path / "objects")
    manifest = await stored(objects)
    first = await fetch_artifact(objects, manifest, tmp_path / "cache")
    shutil.rmtree(tmp_path / "objects")
    assert await fetch_artifact(objects, manifest, tmp_path / "cache") == first


async def test_two_who_want_an_artifact_at_once_fetch_it_once(tmp_path: Path) -> None:
    class Counting(FileObjects):
        fetched = 0

        async def fetch(self, digest: str, to: Path, bytes_max: int = OBJECT_BYTES_MAX) -> None:
            self.fetched += 1
            await super().fetch(digest, to, bytes_max)

    objects = Counting(tmp_path / "objects")
    manifest = await stored(objects)
    places = await asyncio.gather(*(fetch_artifact(objects, manifest, tmp_path / "cache") for _ in range(3)))
    assert len(set(places)) == 1
    assert objects.fetched == len(names(places[0]))


async def test_a_file_that_is_larger_than_its_manifest_says_is_not_taken(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path / "objects")
    manifest = await stored(objects)
    files = tuple(entry.model_copy(update={"size": 1}) for entry in manifest.files)
    with pytest.raises(ArtifactBroken, match="larger than its manifest says"):
        await fetch_artifact(objects, manifest.model_copy(update={"files": files}), tmp_path / "cache")


async def test_a_missing_file_leaves_nothing_behind(tmp_path: Path) -> None:
    manifest = await stored(FileObjects(tmp_path / "other"))
    await FileObjects(tmp_path / "objects").put(b"something else")
    with pytest.raises(ObjectUnknown):
        await fetch_artifact(FileObjects(tmp_path / "objects"), manifest, tmp_path / "cache")
    assert names(tmp_path / "cache") == set()


def test_a_copy_follows_no_link_and_takes_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "to").mkdir()
    with pytest.raises(ArtifactBroken, match="link is missing, a link or no regular file"):
        copy_files(tmp_path, tmp_path / "to", ("link",), 1 << 20)
    assert names(tmp_path / "to") == set()


def test_a_directory_that_is_none_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactBroken, match="cannot be read as a directory"):
        listing(tmp_path / "absent")


def test_a_base_is_recognised_by_its_files(tmp_path: Path) -> None:
    manifest = small_manifest(tmp_path / "base")
    check_base(tmp_path / "base", manifest)
    check_base(small_base(tmp_path / "copy"), manifest)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{}", "config.json is not the file of base small"),
        ("tokenizer.json", b"[]", "tokenizer.json is not the file of base small"),
        ("more.safetensors", b"x", "more.safetensors, which is no part of base small"),
        ("modeling.py", b"x", "modeling.py: a base model's directory must hold no code"),
        ("pytorch_model.bin", b"x", "must hold no code and no pickled weights"),
    ],
)
def test_another_base_is_refused_by_the_file_that_differs(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    manifest = small_manifest(tmp_path / "base")
    (tmp_path / "base" / name).write_bytes(content)
    with pytest.raises(BaseMismatch, match=said):
        check_base(tmp_path / "base", manifest)


def test_a_base_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    manifest = small_manifest(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    with pytest.raises(BaseMismatch, match=r"lacks tokenizer_config\.json"):
        check_base(tmp_path / "base", manifest)
