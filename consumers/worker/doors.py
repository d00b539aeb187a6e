"""What a worker is given: its names, its engine and its doors."""

from dataclasses import dataclass
from pathlib import Path

from consumers.engines.protocol import Engine
from infra.clock import Clock
from infra.failpoints import Failpoints
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.tail import Tail
from infra.metrics import Metrics
from infra.objects import Objects
from ledger.registry import Registry
from ledger.store import Ledger


@dataclass(frozen=True, kw_only=True)
class Doors:
    """Everything a worker touches the world with."""

    worker: str
    pool: str
    base: str
    engine: Engine
    ledger: Ledger
    publisher: Publisher
    audit: AuditWriter
    registry: Registry
    view: Tail
    objects: Objects
    cache: Path
    metrics: Metrics
    clock: Clock
    failpoints: Failpoints
    # Keys the prefix-cache salts of this engine life.
    salt_key: bytes
