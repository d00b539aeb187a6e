"""Files that no other user may read, that are never seen half written, and that one program changes at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@contextmanager
def exclusively(lock: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file. It ends with the process, however that ends. Raises BlockingIOError when not to wait."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
