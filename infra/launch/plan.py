"""What to start, as data: nothing here starts anything."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infra.settings import EngineSettings, RouterSettings

REPOSITORY: Final = Path(__file__).parents[2]
READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 15.0


@dataclass(frozen=True)
class PortOpens:
    """Ready once this port takes connections."""

    port: int


@dataclass(frozen=True)
class SaysReady:
    """Ready once /ready on this port answers 200."""

    port: int


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process: what to run and how to tell that it is ready. Its log is `<home>/logs/<name>.log`."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    folder: Path
    ready: PortOpens | SaysReady
    awaited: bool = True
    ready_seconds_max: float = READY_SECONDS_MAX
    stop_seconds_max: float = STOP_SECONDS_MAX

    @property
    def metrics_port(self) -> int | None:
        return self.ready.port if isinstance(self.ready, SaysReady) else None


# Processes of one stage start together; the next stage begins when all of them are ready.
Plan = tuple[tuple[ProcessSpec, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What a stack consists of. Without processes it is Kafka and Redis, provisioned."""

    home: Path
    router: bool = False
    settler: bool = False
    gate: bool = False
    workers: int = 0
    engine: EngineSettings = field(default_factory=EngineSettings)
    pools: tuple[str, ...] = ("main",)
    # Kafka and Redis by `docker compose` instead of natively.
    containers: bool = False
    # False: go on while engines start, because a new stack has no base model for them yet.
    engines_awaited: bool = True
    # False: stop at once and do not care for the data, as after a test.
    orderly: bool = True
    # How routers treat bases without a tokenizer, which only the fake engine has.
    prompts: RouterSettings = field(default_factory=RouterSettings)
