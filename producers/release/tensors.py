"""safetensors, read strictly and written deterministically. Pure.

The format's reference reader takes more than the format says (facts: names with `../`, headers that begin with a
space, NaN, no tensors at all). This one takes exactly what an adapter or a base needs, and says what is wrong.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InvalidRecord, SwitchyardError
from schemas.record import strict_json

LENGTH_BYTES = 8
ADAPTER_HEADER_BYTES_MAX = 1 << 20
BASE_HEADER_BYTES_MAX = 64 << 20
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,255}")
DIMENSIONS_MAX = 4
METADATA_MAX = 64
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "F16": 2, "BF16": 2,
              "I32": 4, "F32": 4, "I64": 8, "F64": 8}  # fmt: skip


class BadTensors(SwitchyardError):
    """The file is not a safetensors file that Switchyard takes."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file: `start` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(prefix: bytes, file_bytes: int, bytes_max: int) -> int:
    """How long the header is, from the first eight bytes. Raises BadTensors."""
    if len(prefix) < LENGTH_BYTES:
        raise BadTensors(f"the file has {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > bytes_max:
        raise BadTensors(f"the header claims {length} bytes; at most {bytes_max} are taken")
    if length > file_bytes - LENGTH_BYTES:
        raise BadTensors(f"the header claims {length} bytes, more than the file has")
    return length


def parse_header(header: bytes, data_bytes: int) -> tuple[Tensor, ...]:
    """The tensors in the order of their bytes, which fill the file exactly. Raises BadTensors, naming the tensor."""
    if not header.startswith(b"{"):
        raise BadTensors("the header does not begin with '{'")
    try:
        document = strict_json(header, bytes_max=len(header))
    except InvalidRecord as error:
        raise BadTensors(f"the header is not strict JSON: {error}") from error
    _check_metadata(document.pop("__metadata__", {}))
    if not document:
        raise BadTensors("the file holds no tensors")
    tensors = sorted((_parse_entry(name, entry) for name, entry in document.items()), key=lambda tensor: tensor.start)
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise BadTensors(f"tensor {tensor.name}: its bytes overlap another tensor's or leave a hole before them")
        end = tensor.end
    if end != data_bytes:
        raise BadTensors(f"the tensors take {end} bytes but the file holds {data_bytes}")
    return tuple(tensors)


def magnitude(content: bytes, dtype: str) -> float:
    """The largest absolute value; not finite when any value is not. `content` holds F32, F16 or BF16."""
    values: NDArray[np.float32]
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        values = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(content, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    return float(np.abs(values).max(initial=0.0))


def zeros(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    """A file of all-zero tensors: equal shapes give equal bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + math.prod(shapes[name]) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file: its tensors begin at a multiple of eight bytes.
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + bytes(end)


def _check_metadata(metadata: Any) -> None:
    """`Any` because JSON is."""
    if not isinstance(metadata, dict) or len(metadata) > METADATA_MAX:
        raise BadTensors(f"'__metadata__' is no object of at most {METADATA_MAX} entries")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise BadTensors("'__metadata__' holds something else than text")


def _parse_entry(name: str, entry: Any) -> Tensor:
    if not NAME_PATTERN.fullmatch(name):
        raise BadTensors(
            f"tensor {ascii(name)[:80]}: its name is not made of letters, digits, '_' and '.' (at most 256)"
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadTensors(f"tensor {name}: it must have exactly 'dtype', 'shape' and 'data_offsets'")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadTensors(f"tensor {name}: dtype {ascii(dtype)[:40]} is not known")
    if not _counts(shape) or not 1 <= len(shape) <= DIMENSIONS_MAX or 0 in shape:
        raise BadTensors(f"tensor {name}: its shape is not 1 to {DIMENSIONS_MAX} positive whole numbers")
    if not _counts(offsets) or len(offsets) != 2:
        raise BadTensors(f"tensor {name}: 'data_offsets' is not two whole numbers")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BadTensors(f"tensor {name}: {dtype} of shape {shape} does not take the bytes from {start} to {end}")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), start=start, end=end)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
