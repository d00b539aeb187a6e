"""Where a worker's memory is: what it writes for `switchyard worker memory` to show."""

from schemas.ids import Count, Digest
from schemas.record import Value


class AdapterSize(Value):
    """What adapters of one rank and set of modules take in host memory on this engine build, in bytes."""

    rank: Count
    modules: tuple[str, ...]
    bytes: Count
    # By the table of bytes per rank and module.
    predicted: Count


class MemoryReport(Value):
    """Bytes; consumers/engines/memory.py says what each part is. `unexplained` may be negative."""

    worker: str
    engine: str
    base: Digest
    at_ms: Count
    rows: Count
    rows_max: Count
    host_is_device: bool
    base_weights: Count
    slots: Count
    slots_used: Count
    host_cache: Count
    staging: Count
    workspace: Count
    kv_cache: Count
    fragmentation: Count
    process: Count
    limit: Count
    unexplained: int
    slot_bytes: Count
    bytes_per_rank: dict[str, Count]
    adapters: tuple[AdapterSize, ...]
