"""Which files an adapter may consist of, by name, kind, size and first bytes, before anything is parsed. Pure."""

from collections.abc import Iterable, Iterator
from typing import Protocol

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
README = "README.md"
REQUIRED = (CONFIG, WEIGHTS)
BYTES_MAX = {CONFIG: 64 << 10, WEIGHTS: 2 << 30, README: 1 << 20}

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ARCHIVE_SUFFIXES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".bz2", ".xz", ".zst")
HEAD_BYTES = 16
MAGIC = (
    (b"PK\x03\x04", "a zip archive (or a pickled PyTorch file)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"GGUF", "a GGUF model"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"\x7fELF", "a program"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    *((b"\x80" + bytes([protocol]), "a Python pickle") for protocol in range(1, 6)),
)  # fmt: skip


class Entry(Protocol):
    """One entry of a directory, as it is itself."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def links(self) -> int: ...


def listing_problems(entries: Iterable[Entry]) -> Iterator[str]:
    """A sentence for every entry that is not one of the files of an adapter, and every file that is missing."""
    names = set()
    for entry in entries:
        names.add(entry.name)
        problem = _entry_problem(entry)
        if problem:
            yield f"file {ascii(entry.name)[:80]}: {problem}"
    for name in REQUIRED:
        if name not in names:
            yield f"file '{name}': it is missing"


def head_problem(name: str, head: bytes) -> str | None:
    """What a file is by its first bytes, when that is something else than its name says."""
    for magic, what in MAGIC:
        # A safetensors file begins with the length of its header, which may look like any short magic.
        if head.startswith(magic) and not (name == WEIGHTS and head[8:9] == b"{" and len(magic) < 4):
            return f"file '{name}': it is {what}, whatever its name"
    return None


def _entry_problem(entry: Entry) -> str | None:
    if entry.kind == "link":
        return "it is a symbolic link"
    if entry.kind == "directory":
        return "an adapter has no directories"
    if entry.kind != "file":
        return "it is no regular file"
    if entry.links > 1:
        return "it is a hard link: another name could change it"
    return _name_problem(entry.name) or _size_problem(entry)


def _name_problem(name: str) -> str | None:
    lower = name.lower()
    if lower.endswith(PICKLE_SUFFIXES):
        return "pickled weights are never opened; save the adapter as safetensors"
    if lower.endswith(ARCHIVE_SUFFIXES):
        return "archives are never unpacked"
    if name not in BYTES_MAX:
        return f"it is no part of an adapter, which is exactly {CONFIG} and {WEIGHTS} (and {README})"
    return None


def _size_problem(entry: Entry) -> str | None:
    if entry.size > BYTES_MAX[entry.name]:
        return f"it has {entry.size} bytes; at most {BYTES_MAX[entry.name]} are taken"
    return None
