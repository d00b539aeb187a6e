"""Bases and adapters: manifests, which are their identity, and the records of their life."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.digest import canonical, digest_of
from schemas.ids import Alias, Count, Digest, KeyId, PoolId, TenantId
from schemas.record import Record, Value


class FileEntry(Value):
    """One file of an artifact."""

    path: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    size: Count
    sha256: Digest


class BaseManifest(Value):
    """A base model. Its digest is over these fields; `modules` maps a module path to (inputs, outputs)."""

    format_version: Literal[1] = 1
    name: str
    files: tuple[FileEntry, ...]
    tokenizer: Digest
    architecture: str
    layers: Count
    hidden: Count
    vocabulary: Count
    context_max: Count
    dtype: str
    modules: dict[str, tuple[Count, Count]]

    def encode(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return digest_of(self.encode())


class AdapterManifest(Value):
    """An adapter. Its digest is over these fields, the owner among them: two tenants never share one.

    `owner` is None for a base's zero adapter only, which the platform owns.
    """

    format_version: Literal[1] = 1
    owner: TenantId | None
    base: Digest
    tokenizer: Digest
    files: tuple[FileEntry, ...]
    rank: Annotated[int, Field(ge=1, le=512)]
    # Decimal text, since a digest is never taken over a float that another language prints otherwise.
    alpha: Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?$")]
    target_modules: tuple[str, ...]
    dtype: Literal["float32", "float16", "bfloat16"]
    max_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    training_data_version: Annotated[str, Field(max_length=128)] | None = None
    evaluation_report: Digest | None = None

    def encode(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return digest_of(self.encode())


class BaseAdded(Record):
    """A base model and its zero adapter are known from here on. Keyed by the base digest."""

    type: Literal["BaseAdded"] = "BaseAdded"
    version: Literal[1] = 1
    base: Digest
    manifest: BaseManifest
    zero_adapter: Digest


class AdapterSubmitted(Record):
    """An adapter passed scan and validation and is stored; it is not served yet."""

    type: Literal["AdapterSubmitted"] = "AdapterSubmitted"
    version: Literal[1] = 1
    adapter: Digest
    manifest: AdapterManifest
    alias: Alias | None
    validator: str
    submitted_by: str


class GateReport(Value):
    """What the gate saw when it ran the adapter on a real engine."""

    adapter: Digest
    engine: str
    passed: bool
    load_ms: Count
    resident_bytes: Count
    prompts: Count
    # How many of the prompts were answered otherwise than by the base.
    differing: Count
    problems: tuple[str, ...] = ()

    def signed_bytes(self) -> bytes:
        return canonical(self.model_dump(mode="json"))


class AdapterGated(Record):
    """The gate's signed report on an adapter."""

    type: Literal["AdapterGated"] = "AdapterGated"
    version: Literal[1] = 1
    adapter: Digest
    report: GateReport
    key_id: KeyId
    signature: Annotated[str, Field(max_length=1024)]


class Admission(Value):
    """The registry's statement that an adapter may be served; what a worker checks before every load."""

    adapter: Digest
    base: Digest
    owner: TenantId | None
    validator: str
    # Digest of the signed gate report; None for a zero adapter, which is exempt from the effect check.
    report: Digest | None

    def signed_bytes(self) -> bytes:
        return canonical(self.model_dump(mode="json"))


class AdapterApproved(Record):
    """The registry admits an adapter. `signature` is a detached JWS over `admission`."""

    type: Literal["AdapterApproved"] = "AdapterApproved"
    version: Literal[1] = 1
    adapter: Digest
    manifest: AdapterManifest
    admission: Admission
    key_id: KeyId
    signature: Annotated[str, Field(max_length=1024)]
    approved_by: str


class AdapterRevoked(Record):
    """No token of this digest is produced from here on."""

    type: Literal["AdapterRevoked"] = "AdapterRevoked"
    version: Literal[1] = 1
    adapter: Digest
    reason: Annotated[str, Field(min_length=1, max_length=500)]
    revoked_by: str


class AdapterDrained(Record):
    """One worker's receipt for a revocation: queue refused, runs ended, caches reset, engine does not list it."""

    type: Literal["AdapterDrained"] = "AdapterDrained"
    version: Literal[1] = 1
    adapter: Digest
    worker: str
    engine: str
    was_resident: bool
    aborted_jobs: Count


class AliasPointed(Record):
    """A tenant's alias points at a digest; None takes it away. `alias_version` rises with every move."""

    type: Literal["AliasPointed"] = "AliasPointed"
    version: Literal[1] = 1
    tenant: TenantId
    alias: Alias
    stable: Digest | None
    candidate: Digest | None = None
    percent: Annotated[int, Field(ge=0, le=100)] = 0
    alias_version: Count
    pointed_by: str


class PoolConfigured(Record):
    """The workers that serve one base at one maximum rank and context."""

    type: Literal["PoolConfigured"] = "PoolConfigured"
    version: Literal[1] = 1
    pool: PoolId
    base: Digest
    rank_max: Count
    context_max: Count
    partitions: Annotated[int, Field(ge=1, le=256)]
    # Only these tenants are served; None: every tenant. A tenant that has a pool of its own is served there alone.
    tenants: tuple[TenantId, ...] | None = None
    # Parts of every window, in percent, that are held for one tenant each.
    reserved: dict[TenantId, Annotated[int, Field(ge=1, le=100)]] = Field(default_factory=dict)
    # Only workers of these engine builds count as ready; None: any build.
    engines: tuple[str, ...] | None = None


class WorkerReady(Record):
    """A worker serves these partitions now; written anew whenever they change."""

    type: Literal["WorkerReady"] = "WorkerReady"
    version: Literal[1] = 1
    worker: str
    pool: PoolId
    base: Digest
    engine: str
    slots: Count
    rows: Count
    partitions: tuple[Count, ...]
    # What its engine was built for; None in records of before this was said.
    rank_max: Count | None = None
    context_max: Count | None = None


class WorkerGone(Record):
    """A worker stopped in order."""

    type: Literal["WorkerGone"] = "WorkerGone"
    version: Literal[1] = 1
    worker: str
    pool: PoolId
