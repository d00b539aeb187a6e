"""The object store on S3: the same contract as files, over any store that speaks the protocol."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from infra.objects import (
    GET_BYTES_MAX,
    OBJECT_BYTES_MAX,
    Draft,
    ObjectCorrupt,
    ObjectStoreDown,
    ObjectUnknown,
    bounded,
    checked,
    chunks_of,
    hash_of,
    object_key,
    write_checked,
)
from infra.settings import ObjectSettings
from schemas.digest import CHUNK_BYTES
from schemas.ids import is_digest

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
TRIES_MAX = 3


class S3Objects:
    """Objects in a bucket of an S3-compatible store, under the same keys. The bucket must exist.

    Stores differ in conditional writes, so nothing relies on them: a writer reads back, and every reader re-hashes.
    """

    def __init__(self, client: Minio, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def put(self, content: bytes | Path) -> str:
        return await asyncio.to_thread(self._put, content)

    async def get(self, digest: str, bytes_max: int = GET_BYTES_MAX) -> bytes:
        key = object_key(digest)
        return await asyncio.to_thread(lambda: checked(digest, self._read(key, bytes_max)))

    async def fetch(self, digest: str, to: Path, bytes_max: int = OBJECT_BYTES_MAX) -> None:
        key = object_key(digest)
        await asyncio.to_thread(lambda: write_checked(digest, self._read(key, bytes_max), to))

    async def has(self, digest: str) -> bool:
        return is_digest(digest) and await asyncio.to_thread(self._has, object_key(digest))

    def _put(self, content: bytes | Path) -> str:
        with tempfile.TemporaryDirectory(prefix="switchyard-") as directory:
            # A copy of our own: the digest must be of the bytes that are sent, whatever happens to the original.
            copy = Path(directory) / "object"
            with Draft(copy.parent) as draft:
                draft.write(chunks_of(content))
                digest = draft.digest
                draft.finish(copy)
            if not self._holds(digest):
                with _s3_errors():
                    self._client.fput_object(self._bucket, object_key(digest), str(copy))
                if not self._holds(digest):
                    raise ObjectCorrupt
        return digest

    def _holds(self, digest: str) -> bool:
        try:
            return hash_of(self._read(object_key(digest), OBJECT_BYTES_MAX)) == digest
        except ObjectUnknown:
            return False

    def _has(self, key: str) -> bool:
        try:
            with _s3_errors():
                self._client.stat_object(self._bucket, key)
        except ObjectUnknown:
            return False
        return True

    def _read(self, key: str, bytes_max: int) -> Iterator[bytes]:
        with _s3_errors():
            response = self._client.get_object(self._bucket, key)
            try:
                yield from bounded(iter(lambda: response.read(CHUNK_BYTES), b""), bytes_max)
            finally:
                response.close()
                response.release_conn()


def s3_client(settings: ObjectSettings) -> Minio:
    """A client whose every request is bounded in time and tries."""
    assert settings.endpoint is not None
    return Minio(
        settings.endpoint,
        access_key=settings.access_key,
        secret_key=settings.secret_key,
        secure=settings.secure,
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            retries=urllib3.Retry(total=TRIES_MAX, backoff_factor=0.2, status_forcelist=(500, 502, 503, 504)),
        ),
    )


@contextlib.contextmanager
def _s3_errors() -> Iterator[None]:
    try:
        yield
    except S3Error as error:
        if error.code in ("NoSuchKey", "NoSuchObject"):
            raise ObjectUnknown from error
        raise ObjectStoreDown(f"the object store refused: {error.code}") from error
    except (MinioException, urllib3.exceptions.HTTPError) as error:
        raise ObjectStoreDown from error
