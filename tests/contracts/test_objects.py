"""One behaviour suite for every object store: files, and S3 against versitygw where Go can build it."""

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.objects import (
    FileObjects,
    ObjectCorrupt,
    Objects,
    ObjectStoreDown,
    ObjectTooLarge,
    ObjectUnknown,
    object_key,
    open_objects,
)
from infra.settings import BadSettings, ObjectSettings
from tests.versitygw import Gateway, versitygw

HEX = hashlib.sha256(b"never stored").hexdigest()
NO_DIGESTS = {
    "empty": "",
    "hex alone": HEX,
    "other algorithm": f"sha512:{HEX}",
    "upper case": f"sha256:{HEX.upper()}",
    "too short": f"sha256:{HEX[:-1]}",
    "too long": f"sha256:{HEX}0",
    "new line": f"sha256:{HEX}\n",
    "NUL": f"sha256:{HEX[:-1]}\0",
    "path": "sha256:../../../../etc/passwd",
    "absolute path": "/etc/passwd",
    "path of right length": "sha256:" + "../" * 21 + "e",
    "URL": "https://example.com/adapter",
    "percent escape": f"sha256%3A{HEX}",
    "full-width dot": f"sha256:{HEX[:-1]}\uff0e",
    "full-width digit": f"sha256:{HEX[:-1]}\uff10",
}


class Store:
    """An object store and the folder in which its objects can be damaged."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self.objects = objects
        self._folder = folder

    def damage(self, digest: str) -> None:
        path = self._folder / object_key(digest)
        path.chmod(0o600)
        path.write_bytes(b"other bytes")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with versitygw(tmp_path_factory.mktemp("versitygw")) as running:
        yield running


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "files":
        (tmp_path / "objects/sha256").mkdir(parents=True)
        return Store(FileObjects(tmp_path / "objects"), tmp_path / "objects")
    running: Gateway = request.getfixturevalue("gateway")
    settings = running.bucket(f"b{secrets.token_hex(6)}")
    return Store(open_objects(settings), running.folder / settings.bucket)


async def test_what_was_put_is_got_back_under_its_digest(store: Store) -> None:
    content = secrets.token_bytes(1000)
    digest = await store.objects.put(content)
    assert digest == "sha256:" + hashlib.sha256(content).hexdigest()
    assert await store.objects.has(digest)
    assert await store.objects.get(digest) == content


async def test_an_empty_object_is_an_object(store: Store) -> None:
    assert await store.objects.get(await store.objects.put(b"")) == b""


async def test_a_file_of_several_chunks_is_stored_and_fetched_read_only(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(secrets.token_bytes((2 << 20) + 17))
    await store.objects.fetch(await store.objects.put(source), target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o444


async def test_storing_the_same_bytes_again_gives_the_same_digest(store: Store) -> None:
    digests = await asyncio.gather(*(store.objects.put(b"same") for _ in range(4)))
    assert len(set(digests)) == 1
    assert await store.objects.get(digests[0]) == b"same"


@pytest.mark.parametrize("reference", NO_DIGESTS.values(), ids=NO_DIGESTS.keys())
async def test_a_malformed_reference_is_answered_like_an_unknown_one(
    store: Store, reference: str, tmp_path: Path
) -> None:
    with pytest.raises(ObjectUnknown) as unknown:
        await store.objects.get(f"sha256:{HEX}")
    with pytest.raises(ObjectUnknown) as malformed:
        await store.objects.get(reference)
    with pytest.raises(ObjectUnknown):
        await store.objects.fetch(reference, tmp_path / "target")
    assert str(malformed.value) == str(unknown.value)
    assert not await store.objects.has(reference)
    assert not (tmp_path / "target").exists()


async def test_damaged_bytes_are_never_given_out(store: Store, tmp_path: Path) -> None:
    digest = await store.objects.put(b"good bytes!")
    store.damage(digest)
    with pytest.raises(ObjectCorrupt):
        await store.objects.get(digest)
    with pytest.raises(ObjectCorrupt):
        await store.objects.fetch(digest, tmp_path / "target")
    assert not names(tmp_path) - {"objects"}


async def test_putting_the_bytes_again_heals_a_damaged_object(store: Store) -> None:
    digest = await store.objects.put(b"good bytes!")
    store.damage(digest)
    await store.objects.put(b"good bytes!")
    assert await store.objects.get(digest) == b"good bytes!"


async def test_an_object_beyond_the_readers_bound_is_refused(store: Store, tmp_path: Path) -> None:
    digest = await store.objects.put(b"x" * 100)
    assert await store.objects.get(digest, bytes_max=100)
    with pytest.raises(ObjectTooLarge):
        await store.objects.get(digest, bytes_max=99)
    with pytest.raises(ObjectTooLarge):
        await store.objects.fetch(digest, tmp_path / "target", bytes_max=99)
    assert not (tmp_path / "target").exists()


async def test_a_malformed_reference_opens_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    objects = FileObjects(tmp_path)
    monkeypatch.setattr("infra.objects.os.open", lambda *_: pytest.fail("a file was opened"))
    for reference in NO_DIGESTS.values():
        with pytest.raises(ObjectUnknown):
            await objects.get(reference)


async def test_a_link_in_the_store_is_not_followed(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path / "objects")
    digest = await objects.put(b"content")
    path = tmp_path / "objects" / object_key(digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ObjectUnknown):
        await objects.get(digest)


async def test_objects_are_read_only_and_no_draft_is_left(tmp_path: Path) -> None:
    digest = await FileObjects(tmp_path).put(b"content")
    assert (tmp_path / object_key(digest)).stat().st_mode & 0o777 == 0o444
    assert names(tmp_path) == {"sha256"}


async def test_a_directory_without_any_object_is_a_store_that_is_away(tmp_path: Path) -> None:
    digest = await FileObjects(tmp_path / "objects").put(b"content")
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    (tmp_path / "objects").mkdir()
    with pytest.raises(ObjectStoreDown, match="is it mounted"):
        await FileObjects(tmp_path / "objects").get(digest)
    with pytest.raises(ObjectStoreDown):
        await FileObjects(tmp_path / "objects").fetch(digest, tmp_path / "fetched")


def test_a_store_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(BadSettings, match="SWITCHYARD_OBJECTS_DIRECTORY"):
        open_objects(ObjectSettings())
