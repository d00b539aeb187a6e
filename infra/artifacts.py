"""Files of adapters and bases on this machine: listed, copied, hashed and fetched without following a link."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from weakref import WeakValueDictionary

from infra.objects import Draft, Objects, ObjectTooLarge, ObjectUnknown, read_file
from schemas.adapters import AdapterManifest, BaseManifest, FileEntry
from schemas.errors import SwitchyardError

# More entries than this in one directory are not worth naming.
LISTED_MAX = 64
# Stored as evidence, never given to an engine.
NOT_DELIVERED = frozenset({"README.md"})
BASE_FILE_BYTES_MAX = 1 << 40
# What an engine reads of a base model, beside its `*.safetensors`. Nothing else is hashed, and code is refused.
BASE_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
# Where artifacts are being fetched to. Two fetches of one would each discard what the other has just put there.
_in_hand: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
CODE_OR_PICKLE = frozenset({".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class ArtifactBroken(SwitchyardError):
    """The files on disk are not those of the manifest."""


class BaseMismatch(SwitchyardError):
    """The directory does not hold the base model that its digest names."""


class FileKind(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    LINK = "link"
    DIRECTORY = "directory"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One entry of a directory, as it is itself: no link is followed."""

    name: str
    kind: FileKind
    size: int
    links: int


def listing(directory: Path) -> tuple[Listed, ...]:
    """The first LISTED_MAX entries by name. Raises ArtifactBroken where `directory` is no readable directory."""
    try:
        paths = sorted(directory.iterdir())[:LISTED_MAX]
        return tuple(_listed(path.name, path.lstat()) for path in paths)
    except OSError as error:
        raise ArtifactBroken(f"{directory} cannot be read as a directory: {error.strerror}") from error


def copy_files(directory: Path, to: Path, names: tuple[str, ...], bytes_max: int) -> None:
    """Copy named files into `to`, so that what is checked next is what is stored.

    Raises ArtifactBroken for a file that is gone, a link, or larger than `bytes_max`.
    """
    for name in names:
        with _naming(name), Draft(to) as draft:
            draft.write(read_file(directory / name, bytes_max))
            draft.finish(to / name)


def hash_file(path: Path, bytes_max: int = BASE_FILE_BYTES_MAX) -> FileEntry:
    """Size and digest of one file. Raises ArtifactBroken."""
    hasher, size = hashlib.sha256(), 0
    with _naming(path.name):
        for chunk in read_file(path, bytes_max):
            hasher.update(chunk)
            size += len(chunk)
    return FileEntry(path=path.name, size=size, sha256="sha256:" + hasher.hexdigest())


async def fetch_artifact(objects: Objects, manifest: AdapterManifest, cache: Path) -> Path:
    """A read-only directory `<cache>/<hex of the digest>` with exactly the manifest's files.

    Every file is hashed, also when the directory is there already: what lies on a disk may have changed. Raises
    ObjectUnknown, ObjectCorrupt, ArtifactBroken.
    """
    place = cache / manifest.digest.removeprefix("sha256:")
    async with _in_hand.setdefault(place, asyncio.Lock()):
        await _fetch_to(place, objects, manifest, cache)
    return place


async def _fetch_to(place: Path, objects: Objects, manifest: AdapterManifest, cache: Path) -> None:
    if await asyncio.to_thread(_is_whole, place, manifest):
        return
    await asyncio.to_thread(_discard, place)
    draft = await asyncio.to_thread(_draft_directory, cache)
    try:
        for entry in _delivered(manifest):
            await objects.fetch(entry.sha256, draft / entry.path, bytes_max=entry.size)
        await asyncio.to_thread(_publish, draft, place)
    except ObjectTooLarge as error:
        raise ArtifactBroken("a stored file is larger than its manifest says") from error
    finally:
        await asyncio.to_thread(_discard, draft)
    if not await asyncio.to_thread(_is_whole, place, manifest):
        raise ArtifactBroken(f"the files of {manifest.digest} in {cache} are not those of its manifest")


async def fetch_files(objects: Objects, files: tuple[FileEntry, ...], place: Path) -> None:
    """Put these files into a folder and hash them. Raises ObjectUnknown, ObjectCorrupt, ArtifactBroken.

    One that is there already, and is the file of its digest, is not asked for again: the store may be away.
    """
    await asyncio.to_thread(place.mkdir, parents=True, exist_ok=True, mode=0o700)
    for entry in files:
        with contextlib.suppress(ArtifactBroken):
            if await asyncio.to_thread(hash_file, place / entry.path, entry.size) == entry:
                continue
        try:
            await objects.fetch(entry.sha256, place / entry.path, bytes_max=entry.size)
        except ObjectTooLarge as error:
            raise ArtifactBroken(f"{entry.path} is larger in the store than its manifest says") from error
        if await asyncio.to_thread(hash_file, place / entry.path) != entry:
            raise ArtifactBroken(f"{entry.path} is not the file of its manifest")


def base_files(directory: Path) -> tuple[Path, ...]:
    """The files that make up a base model. Raises BaseMismatch where code or pickled weights lie beside them."""
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise BaseMismatch(f"{directory} cannot be read as a directory: {error.strerror}") from error
    for path in paths:
        if path.suffix in CODE_OR_PICKLE:
            raise BaseMismatch(f"{path.name}: a base model's directory must hold no code and no pickled weights")
    return tuple(path for path in paths if path.name in BASE_FILES or path.suffix == ".safetensors")


def check_base(directory: Path, manifest: BaseManifest) -> None:
    """Hash a base model's files again. Raises BaseMismatch, naming the first file that differs."""
    wanted = {entry.path: entry for entry in manifest.files}
    paths = {path.name: path for path in base_files(directory)}
    for name in sorted(wanted.keys() | paths.keys()):
        if name not in paths:
            raise BaseMismatch(f"{directory} lacks {name} of base {manifest.name}")
        if name not in wanted:
            raise BaseMismatch(f"{directory} holds {name}, which is no part of base {manifest.name}")
        if paths[name].stat().st_size != wanted[name].size or hash_file(paths[name]) != wanted[name]:
            raise BaseMismatch(f"{directory / name} is not the file of base {manifest.name}")


def find_base(directory: Path, manifest: BaseManifest) -> Path:
    """The directory of a base model: `directory` itself, or the one inside it that holds these very files."""
    if (directory / "config.json").is_file():
        check_base(directory, manifest)
        return directory
    problems: list[str] = []
    for inner in sorted(path for path in directory.glob("*") if (path / "config.json").is_file()):
        try:
            check_base(inner, manifest)
        except BaseMismatch as error:
            problems.append(str(error))
        else:
            return inner
    raise BaseMismatch("; ".join(problems) or f"{directory} holds no base model; name it with SWITCHYARD_ENGINE_BASE")


def _listed(name: str, status: os.stat_result) -> Listed:
    kinds = {stat.S_IFREG: FileKind.FILE, stat.S_IFLNK: FileKind.LINK, stat.S_IFDIR: FileKind.DIRECTORY}
    kind = kinds.get(stat.S_IFMT(status.st_mode), FileKind.OTHER)
    return Listed(name=name, kind=kind, size=status.st_size, links=status.st_nlink)


def _delivered(manifest: AdapterManifest) -> tuple[FileEntry, ...]:
    return tuple(entry for entry in manifest.files if entry.path not in NOT_DELIVERED)


def _is_whole(place: Path, manifest: AdapterManifest) -> bool:
    wanted = {entry.path: entry for entry in _delivered(manifest)}
    if not place.is_dir() or place.is_symlink() or {path.name for path in place.iterdir()} != wanted.keys():
        return False
    try:
        return all(hash_file(place / name, bytes_max=entry.size) == entry for name, entry in wanted.items())
    except ArtifactBroken:
        return False


def _draft_directory(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(dir=cache, prefix=".draft-"))


def _publish(draft: Path, place: Path) -> None:
    draft.chmod(0o555)
    # Another process may have put it there; the caller hashes what is there, whoever wrote it.
    with contextlib.suppress(OSError):
        draft.rename(place)


def _discard(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.is_dir():
        place.chmod(0o700)
        shutil.rmtree(place)


class _naming(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a verb
    """Turns the store's errors into ones that name the file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ObjectUnknown):
            raise ArtifactBroken(f"{self._name} is missing, a link or no regular file") from error
        if isinstance(error, ObjectTooLarge):
            raise ArtifactBroken(f"{self._name} is larger than is allowed") from error
