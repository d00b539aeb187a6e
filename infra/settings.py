"""Settings: one small frozen model per concern, read once from the environment, and the file that describes a stack.

`SWITCHYARD_<SECTION>_<FIELD>` is one field of one section: SWITCHYARD_KAFKA_BOOTSTRAP is KafkaSettings.bootstrap.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FilePath, ValidationError

from infra.files import exclusively, write_private
from schemas.errors import SwitchyardError
from schemas.keys import KeyRole

PREFIX = "SWITCHYARD_"


class BadSettings(SwitchyardError):
    """A setting is missing, unknown or of the wrong kind."""


class NoStack(SwitchyardError):
    """No stack runs here. Start one with: switchyard up"""


class Settings(BaseModel):
    """One concern's settings. An unknown field is refused, so that a misspelt variable is not silently the default."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    section: ClassVar[str]

    def environment(self) -> dict[str, str]:
        """The variables from which `read` makes an equal value."""
        fields = self.model_dump(mode="json", exclude_none=True)
        return {f"{PREFIX}{self.section}_{name}".upper(): str(value) for name, value in fields.items()}


SettingsKind = TypeVar("SettingsKind", bound=Settings)


def read(kind: type[SettingsKind], environ: Mapping[str, str] = os.environ) -> SettingsKind:
    """One section from the environment. Raises BadSettings, naming the variables."""
    prefix = f"{PREFIX}{kind.section}_".upper()
    given = {name.removeprefix(prefix).lower(): value for name, value in environ.items() if name.startswith(prefix)}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems = [
            f"{prefix}{'_'.join(map(str, problem['loc'])).upper()}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_url=False)
        ]
        raise BadSettings("; ".join(problems)) from error


class KafkaSettings(Settings):
    """How one user reaches Kafka. Groups of a user must begin with its name and a dot (see `group`)."""

    section: ClassVar[str] = "kafka"
    bootstrap: str
    username: str
    password: str = Field(repr=False)
    mechanism: Literal["SCRAM-SHA-512"] = "SCRAM-SHA-512"
    protocol: Literal["SASL_PLAINTEXT", "SASL_SSL"] = "SASL_PLAINTEXT"

    def group(self, name: str) -> str:
        """A consumer group that this user's ACLs allow."""
        return f"{self.username}.{name}"

    def librdkafka(self) -> dict[str, str]:
        """The same as options of librdkafka clients (confluent-kafka and most other languages)."""
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
            "sasl.mechanism": self.mechanism,
            "sasl.username": self.username,
            "sasl.password": self.password,
        }


_HOST = r"(\[[^\]\s]+\]|[^\s:/@,\[\]]+)"
_REDIS = re.compile(
    rf"unix://\S+|rediss?://([^\s/@]*@)?{_HOST}(:\d+)?(/\d*)?(\?\S*)?|rediss?\+cluster://{_HOST}:\d+(,{_HOST}:\d+)*/?"
)


def _redis_url(url: str) -> str:
    if not _REDIS.fullmatch(url):
        # The URL is not repeated: a password may be in it.
        raise ValueError("not a URL like redis://host:6379/0 or redis+cluster://host:6379,host:6379 (rediss for TLS)")
    return url


RedisUrl = Annotated[str, AfterValidator(_redis_url)]


class RedisSettings(Settings):
    """How one user reaches Redis. The schemes of `url`: `infra/redis.py`."""

    section: ClassVar[str] = "redis"
    url: RedisUrl
    username: str
    password: str = Field(repr=False)
    #: Whose certificates are believed over TLS; None: those that the system believes.
    ca_file: FilePath | None = None


class RouterSettings(Settings):
    """What a router does with a base that has no tokenizer: admit nothing, or count words as the fake engine does."""

    section: ClassVar[str] = "router"
    without_tokenizer: Literal["refuse", "words"] = "refuse"


class KeeperSettings(Settings):
    """How a router reaches Redis as one who may rebuild the ledger. Without it, somebody else must."""

    section: ClassVar[str] = "keeper"
    url: RedisUrl | None = None
    username: str = "operator"
    password: str = Field(default="", repr=False)
    ca_file: FilePath | None = None

    def redis(self) -> RedisSettings | None:
        return RedisSettings.model_validate(self.model_dump()) if self.url else None


class ObjectSettings(Settings):
    """Where artifacts lie: a directory, or an S3 endpoint with a bucket."""

    section: ClassVar[str] = "objects"
    directory: Path | None = None
    endpoint: str | None = None
    bucket: str = "switchyard"
    access_key: str | None = None
    secret_key: str | None = Field(default=None, repr=False)
    secure: bool = True


class KeySettings(Settings):
    """Where this process's private keys lie, a PEM file each; the key's id is the role and a number.

    `number` None: a role signs with its newest key, so a process takes up a rotated one when it starts again.
    """

    section: ClassVar[str] = "keys"
    directory: Path
    number: int | None = None

    def path(self, role: KeyRole) -> Path:
        return self.directory / f"{self.key_id(role)}.pem"

    def key_id(self, role: KeyRole) -> str:
        return f"{role.value}-{self.number or self.newest(role) or 1}"

    def newest(self, role: KeyRole) -> int:
        """The number of a role's newest key here, 0 where there is none."""
        numbers = [path.stem.removeprefix(f"{role.value}-") for path in self.directory.glob(f"{role.value}-*.pem")]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)


class ProcessSettings(Settings):
    """What every process has: a name unique in the stack, a folder of its own, a port for metrics (0: any)."""

    section: ClassVar[str] = "process"
    name: str
    home: Path
    metrics_port: int = 0


class EngineSettings(Settings):
    """The engine that a worker or a gate owns. Options apply to every engine that knows them."""

    section: ClassVar[str] = "engine"
    #: None: what suits the device, vLLM in this process on a CPU and in its own processes on a GPU.
    kind: Literal["vllm", "vllm-async", "peft", "fake"] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    base: Path | None = None
    slots: int = Field(default=4, ge=1)
    rows: int = Field(default=16, ge=1)
    rank_max: int = Field(default=8, ge=1)
    context_max: int = Field(default=1024, ge=16)
    kv_bytes: int = Field(default=256 << 20, ge=1)
    #: Copies of adapters in host memory, those in slots included.
    host_bytes: int = Field(default=1 << 30, ge=1)
    host_adapters_max: int = Field(default=64, ge=1)
    #: What the engine's process may occupy; None: what was free when it started.
    memory_bytes: int | None = Field(default=None, ge=1)
    step_ms: int = Field(default=25, ge=0)


class PoolSettings(Settings):
    """The pool that a worker serves, or that the router's process routes to."""

    section: ClassVar[str] = "pool"
    name: str = "main"


class LaunchSettings(Settings):
    """What the launcher cannot find by itself: another folder of Kafka's jars."""

    section: ClassVar[str] = "launch"
    jars: Path | None = None


class Running(BaseModel):
    """One process of a stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    pid: int
    log: Path
    metrics_port: int | None = None


class StackFile(BaseModel):
    """A running stack, as written to `<home>/stack.json` (mode 0600, for it holds passwords)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    home: Path
    bootstrap: str
    redis_url: str
    objects: ObjectSettings
    kafka_users: dict[str, str] = Field(repr=False)
    redis_users: dict[str, str] = Field(repr=False)
    supervisor: int | None = None
    processes: dict[str, Running] = {}

    @property
    def keys(self) -> KeySettings:
        return KeySettings(directory=self.home / "keys")

    def kafka(self, user: str) -> KafkaSettings:
        """Settings of a role or a tenant."""
        if user not in self.kafka_users:
            raise BadSettings(f"this stack has no Kafka user {user!r}")
        return KafkaSettings(bootstrap=self.bootstrap, username=user, password=self.kafka_users[user])

    def redis(self, role: str) -> RedisSettings:
        if role not in self.redis_users:
            raise BadSettings(f"this stack has no Redis user {role!r}")
        return RedisSettings(url=self.redis_url, username=role, password=self.redis_users[role])

    def save(self) -> None:
        write_private(self.home / "stack.json", self.model_dump_json(indent=1).encode())

    @classmethod
    def change(cls, home: Path, change: Callable[[Self], Self]) -> Self:
        """Load, change and save, while no other program does. Raises as `load`."""
        with exclusively(home / "stack.lock"):
            changed = change(cls.load(home))
            changed.save()
        return changed

    def with_user(self, name: str, password: str) -> Self:
        return self.model_copy(update={"kafka_users": {**self.kafka_users, name: password}})

    def without_user(self, name: str) -> Self:
        kept = {user: password for user, password in self.kafka_users.items() if user != name}
        return self.model_copy(update={"kafka_users": kept})

    @classmethod
    def load(cls, home: Path) -> Self:
        """Raises NoStack, or BadSettings when the file is of another version."""
        try:
            return cls.model_validate(json.loads((home / "stack.json").read_bytes()))
        except FileNotFoundError as error:
            raise NoStack from error
        except ValidationError as error:
            raise BadSettings(f"{home / 'stack.json'} was written by another version of Switchyard") from error


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this machine's stack keeps its data: SWITCHYARD_HOME, or .switchyard in the current folder."""
    return Path(environ.get(f"{PREFIX}HOME", ".switchyard")).absolute()
