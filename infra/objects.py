"""The object store: immutable, content-addressed, verified when written and again when read.

A reference is a digest and nothing else. Whatever is no digest (a path, a URL, a digest with one odd character) is
answered exactly like a digest that nobody stored, before anything is opened or sent.
"""

import asyncio
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from infra.settings import BadSettings, ObjectSettings
from schemas.digest import CHUNK_BYTES, digest_of
from schemas.errors import SwitchyardError
from schemas.ids import is_digest

# The largest file of an adapter or a batch; base models are not stored here.
OBJECT_BYTES_MAX = 4 << 30
# What one caller may hold in memory.
GET_BYTES_MAX = 64 << 20
# ELOOP: a link, which is never followed.
NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class ObjectUnknown(SwitchyardError):
    """The object store has no such object."""


class ObjectCorrupt(SwitchyardError):
    """The object store holds other bytes under this digest than those that were stored."""


class ObjectTooLarge(SwitchyardError):
    """The object is larger than is allowed here."""


class ObjectStoreDown(SwitchyardError):
    """The object store does not answer."""


class Objects(Protocol):
    """What every object store keeps. Methods may be called from many tasks at once.

    Each may raise ObjectStoreDown. Readers get bytes that were hashed on the way, or an error: never other bytes.
    """

    async def put(self, content: bytes | Path) -> str:
        """Store bytes, or a file's bytes, and return their digest. Storing the same again changes nothing.

        Raises ObjectTooLarge.
        """
        ...

    async def get(self, digest: str, bytes_max: int = GET_BYTES_MAX) -> bytes:
        """The bytes. Raises ObjectUnknown (malformed references too), ObjectCorrupt, ObjectTooLarge."""
        ...

    async def fetch(self, digest: str, to: Path, bytes_max: int = OBJECT_BYTES_MAX) -> None:
        """Write the bytes to a new read-only file, which appears whole or not at all. Raises as `get`."""
        ...

    async def has(self, digest: str) -> bool:
        """Whether something is stored under this digest. False for a malformed one."""
        ...


class Draft:
    """A file that is hashed while it is written and appears, read-only, when it is finished."""

    def __init__(self, directory: Path) -> None:
        self._descriptor, name = tempfile.mkstemp(dir=directory, prefix=".draft-")
        self._path = Path(name)
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def write(self, chunks: Iterator[bytes]) -> None:
        for chunk in chunks:
            self._hash.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def finish(self, to: Path) -> None:
        os.fchmod(self._descriptor, 0o444)
        os.fsync(self._descriptor)
        self._path.rename(to)
        _sync_directory(to.parent)


class FileObjects:
    """Objects as files `<directory>/sha256/<first two>/<hex>`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(self, content: bytes | Path) -> str:
        try:
            return await asyncio.to_thread(self._put, content)
        except OSError as error:
            raise ObjectStoreDown(f"{self._directory} cannot be written: {error.strerror}") from error

    async def get(self, digest: str, bytes_max: int = GET_BYTES_MAX) -> bytes:
        path = self._path(digest)
        return await asyncio.to_thread(lambda: checked(digest, self._read(path, bytes_max)))

    async def fetch(self, digest: str, to: Path, bytes_max: int = OBJECT_BYTES_MAX) -> None:
        path = self._path(digest)
        await asyncio.to_thread(lambda: write_checked(digest, self._read(path, bytes_max), to))

    async def has(self, digest: str) -> bool:
        return is_digest(digest) and await asyncio.to_thread(self._path(digest).is_file)

    def _read(self, path: Path, bytes_max: int) -> Iterator[bytes]:
        """As `read_file`. Where not one object lies, the directory is not the store: a volume that is away."""
        try:
            yield from read_file(path, bytes_max)
        except ObjectUnknown as error:
            if not path.parents[1].is_dir():
                raise ObjectStoreDown(f"{self._directory} holds no objects: is it mounted?") from error
            raise

    def _put(self, content: bytes | Path) -> str:
        self._directory.mkdir(parents=True, exist_ok=True)
        with Draft(self._directory) as draft:
            draft.write(chunks_of(content))
            path = self._path(draft.digest)
            if not _holds(path, draft.digest):
                path.parent.mkdir(parents=True, exist_ok=True)
                draft.finish(path)
            return draft.digest

    def _path(self, digest: str) -> Path:
        return self._directory / object_key(digest)


def open_objects(settings: ObjectSettings) -> Objects:
    """The store that the settings name. Nothing is connected to before the first use."""
    if settings.endpoint is not None:
        # Only a stack with S3 pays for importing its client.
        from infra.s3 import S3Objects, s3_client

        return S3Objects(s3_client(settings), settings.bucket)
    if settings.directory is None:
        raise BadSettings("set SWITCHYARD_OBJECTS_DIRECTORY, or SWITCHYARD_OBJECTS_ENDPOINT and its bucket and keys")
    return FileObjects(settings.directory)


def object_key(digest: str) -> str:
    """Where a digest's bytes lie. Raises ObjectUnknown for anything but a digest."""
    if not is_digest(digest):
        raise ObjectUnknown
    value = digest.removeprefix("sha256:")
    return f"sha256/{value[:2]}/{value}"


def read_file(path: Path, bytes_max: int) -> Iterator[bytes]:
    """The chunks of a regular file, never through a link. Raises ObjectUnknown, ObjectTooLarge."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise (ObjectUnknown if error.errno in NOT_THERE else ObjectStoreDown) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ObjectUnknown
        yield from bounded(iter(lambda: os.read(descriptor, CHUNK_BYTES), b""), bytes_max)
    finally:
        os.close(descriptor)


def bounded(chunks: Iterator[bytes], bytes_max: int) -> Iterator[bytes]:
    for chunk in chunks:
        bytes_max -= len(chunk)
        if bytes_max < 0:
            raise ObjectTooLarge
        yield chunk


def chunks_of(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        return bounded(iter((content,)), OBJECT_BYTES_MAX)
    return read_file(content, OBJECT_BYTES_MAX)


def hash_of(chunks: Iterator[bytes]) -> str:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return "sha256:" + hasher.hexdigest()


def _holds(path: Path, digest: str) -> bool:
    try:
        return hash_of(read_file(path, OBJECT_BYTES_MAX)) == digest
    except ObjectUnknown:
        return False


def checked(digest: str, chunks: Iterator[bytes]) -> bytes:
    content = b"".join(chunks)
    if digest_of(content) != digest:
        raise ObjectCorrupt
    return content


def write_checked(digest: str, chunks: Iterator[bytes], to: Path) -> None:
    with Draft(to.parent) as draft:
        draft.write(chunks)
        if draft.digest != digest:
            raise ObjectCorrupt
        draft.finish(to)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
