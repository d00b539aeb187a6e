"""The registry view: a fold of the record topics. Pure: feed it records, ask it what stands."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from schemas.adapters import (
    AdapterApproved,
    AdapterDrained,
    AdapterGated,
    AdapterManifest,
    AdapterRevoked,
    AdapterSubmitted,
    AliasPointed,
    BaseAdded,
    PoolConfigured,
    WorkerGone,
    WorkerReady,
)
from schemas.errors import BadSignature, InvalidRecord
from schemas.jobs import JobClass
from schemas.keys import KeyPublished, KeyRevoked, KeyRole
from schemas.record import Record, decode_one_of
from schemas.signing import SigningKey, verify
from schemas.tenants import AliasGranted, AliasWithdrawn, TenantConfigured, TenantState
from schemas.topics import REGISTRY

RECORDS = {topic.name: topic.records for topic in REGISTRY}
# Jobs a pool partition takes at once: one batch in the engine and the next one at hand.
WINDOW_PER_ROW = 2
# Whether a worker that said that it is ready is there now.
Present = Callable[[WorkerReady], bool]


@dataclass(frozen=True, kw_only=True)
class AdapterEntry:
    """What the log says of one adapter."""

    digest: str
    submitted: AdapterSubmitted | None = None
    gated: AdapterGated | None = None
    approved: AdapterApproved | None = None
    revoked: AdapterRevoked | None = None
    drained: tuple[AdapterDrained, ...] = ()

    @property
    def manifest(self) -> AdapterManifest | None:
        known = self.approved or self.submitted
        return known.manifest if known else None

    @property
    def state(self) -> str:
        if self.revoked:
            return "revoked"
        if self.approved:
            return "approved"
        if self.gated:
            return "gated" if self.gated.report.passed else "failed"
        return "submitted"

    @property
    def serves(self) -> bool:
        return self.approved is not None and self.revoked is None


@dataclass(kw_only=True)
class Registry:
    """State folded from `adapters`, `aliases`, `tenants`, `pools`, `workers` and `keys`."""

    positions: dict[str, int] = field(default_factory=dict)
    bases: dict[str, BaseAdded] = field(default_factory=dict)
    adapters: dict[str, AdapterEntry] = field(default_factory=dict)
    aliases: dict[tuple[str, str], AliasPointed] = field(default_factory=dict)
    tenants: dict[str, TenantConfigured] = field(default_factory=dict)
    # What stands for each alias of each tenant; withdrawn ones are left out.
    grants: dict[tuple[str, str], AliasGranted] = field(default_factory=dict)
    # Every alias that was granted once, whatever became of it: an approval grants no such alias again.
    ever_granted: set[tuple[str, str]] = field(default_factory=set)
    pools: dict[str, PoolConfigured] = field(default_factory=dict)
    workers: dict[str, WorkerReady] = field(default_factory=dict)
    # Which worker said last that it serves a pool's partition. A killed one takes nothing back from its successor.
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    published: dict[str, KeyPublished] = field(default_factory=dict)
    # For ever: who took a key could publish it again under its id.
    revoked_keys: set[str] = field(default_factory=set)
    # A signature is checked once for as long as neither adapters nor keys change: it costs more than the decision.
    _verdicts: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    _report_verdicts: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def apply(self, topic: str, offset: int, content: bytes | None) -> Record:
        """Fold one record. Raises InvalidRecord: a record topic that does not parse stops the process."""
        try:
            record: Record = decode_one_of(RECORDS[topic], content)
        except InvalidRecord as error:
            raise InvalidRecord(f"{topic} cannot be read at offset {offset}: {error}") from error
        self._fold(record)
        self.positions[topic] = offset + 1
        return record

    def keys(self, role: KeyRole) -> dict[str, str]:
        """Public keys by id of one role, revoked ones left out."""
        return {key_id: key.public_key for key_id, key in self.published.items() if key.role is role}

    def signing_problem(self, key: SigningKey) -> str | None:
        """Why nothing that a process signs with this key would be believed, for its operator."""
        if self.keys(key.role).get(key.key_id) == key.public_key:
            return None
        return (
            f"the signing key {key.key_id} is not published, or was revoked: make the next one with "
            f"`switchyard key rotate {key.role}`, then start this process again"
        )

    def active_tenants(self) -> list[str]:
        return sorted(name for name, tenant in self.tenants.items() if tenant.state is TenantState.ACTIVE)

    def grant_for(self, tenant: str, alias: str, job_class: JobClass, now_ms: int) -> AliasGranted | None:
        """What lets a tenant use an alias for a class of jobs now, or None: then there is no such alias."""
        grant = self.grants.get((tenant, alias))
        if grant is None or job_class not in grant.classes or now_ms < grant.not_before_ms:
            return None
        return grant if grant.expires_at_ms is None or now_ms < grant.expires_at_ms else None

    def base_behind(self, tenant: str, alias: str) -> BaseAdded | None:
        """The base of what a tenant's alias points at, where it points at anything."""
        pointed = self.aliases.get((tenant, alias))
        entry = self.adapters.get(pointed.stable) if pointed is not None and pointed.stable is not None else None
        manifest = entry.manifest if entry is not None else None
        return self.bases.get(manifest.base) if manifest is not None else None

    def owner_of(self, pool: str, partition: int) -> WorkerReady | None:
        """The ready worker that serves a pool's partition: the last one that said so, where it suits the pool."""
        worker = self.workers.get(self.owners.get((pool, partition), ""))
        return worker if worker is not None and self._suits(pool, worker) else None

    def window_of(self, pool: str, partition: int, present: Present) -> int:
        """How many admitted, unfinished jobs a partition takes at once; none without a ready owner that is there."""
        owner = self.owner_of(pool, partition)
        return WINDOW_PER_ROW * owner.rows if owner and present(owner) else 0

    def serving(self) -> list[WorkerReady]:
        """The ready workers that serve some partition of their pool."""
        workers = [self.workers[name] for name in sorted(set(self.owners.values()))]
        return [worker for worker in workers if worker.rows and self._suits(worker.pool, worker)]

    def _suits(self, pool: str, worker: WorkerReady) -> bool:
        """Whether a worker runs what its pool is configured for now: a pool may have changed since the worker began."""
        configured = self.pools.get(pool)
        return configured is None or (
            worker.base == configured.base
            and (configured.engines is None or worker.engine in configured.engines)
            and (worker.rank_max is None or worker.rank_max >= configured.rank_max)
            and (worker.context_max is None or worker.context_max >= configured.context_max)
        )

    def passed(self, positions: dict[str, int]) -> bool:
        """Whether this view stands where another one stood, or further."""
        return all(self.positions.get(topic, 0) >= offset for topic, offset in positions.items())

    def admission_problem(self, digest: str) -> str | None:
        """Why this adapter may not be served, or None: approved by the registry's key, not revoked."""
        if digest not in self._verdicts and digest in self.adapters:
            self._verdicts[digest] = self._judge(digest)
        return self._verdicts.get(digest, "adapter_not_approved")

    def report_problem(self, digest: str) -> str | None:
        """Why the gate's report on an adapter counts as none, or None: a gate's key signed it that is believed now."""
        if digest not in self._report_verdicts:
            self._report_verdicts[digest] = self._judge_report(digest)
        return self._report_verdicts[digest]

    def _judge_report(self, digest: str) -> str | None:
        entry = self.adapters.get(digest)
        if entry is None or entry.gated is None:
            return "the gate has not reported on it"
        gated = entry.gated
        if gated.report.adapter != digest:
            return "it is about another adapter"
        try:
            verify(gated.report, gated.signature, gated.key_id, KeyRole.GATE, self.keys(KeyRole.GATE))
        except BadSignature as error:
            return str(error)
        return None

    def _judge(self, digest: str) -> str | None:
        entry = self.adapters.get(digest)
        if entry is None or entry.approved is None:
            return "adapter_not_approved"
        if entry.revoked is not None:
            return "adapter_revoked"
        approved = entry.approved
        if approved.admission.adapter != digest or approved.manifest.digest != digest:
            return "admission_mismatch"
        try:
            verify(
                approved.admission, approved.signature, approved.key_id, KeyRole.REGISTRY, self.keys(KeyRole.REGISTRY)
            )
        except BadSignature:
            return "admission_signature"
        return None

    def _fold(self, record: Record) -> None:
        self._verdicts.clear()
        match record:
            case BaseAdded():
                self.bases[record.base] = record
            case AliasPointed():
                self.aliases[record.tenant, record.alias] = record
            case TenantConfigured():
                self.tenants[record.tenant] = record
            case AliasGranted():
                self.grants[record.tenant, record.alias] = record
                self.ever_granted.add((record.tenant, record.alias))
            case AliasWithdrawn():
                self.grants.pop((record.tenant, record.alias), None)
            case PoolConfigured():
                self.pools[record.pool] = record
            case WorkerReady() | WorkerGone():
                self._fold_worker(record)
            case KeyPublished():
                self._report_verdicts.clear()
                if record.key_id not in self.revoked_keys:
                    self.published[record.key_id] = record
            case KeyRevoked():
                self._report_verdicts.clear()
                self.published.pop(record.key_id, None)
                self.revoked_keys.add(record.key_id)
            case _:
                self._fold_adapter(record)

    def _fold_worker(self, record: WorkerReady | WorkerGone) -> None:
        # The last to speak comes last.
        self.workers.pop(record.worker, None)
        self.owners = {place: worker for place, worker in self.owners.items() if worker != record.worker}
        if isinstance(record, WorkerReady):
            self.workers[record.worker] = record
            self.owners |= {(record.pool, partition): record.worker for partition in record.partitions}

    def _fold_adapter(self, record: Record) -> None:
        match record:
            case AdapterSubmitted():
                self._change(record.adapter, submitted=record)
            case AdapterGated():
                self._change(record.adapter, gated=record)
                self._report_verdicts.pop(record.adapter, None)
            case AdapterApproved():
                self._change(record.adapter, approved=record)
            case AdapterRevoked():
                self._change(record.adapter, revoked=record)
            case AdapterDrained():
                entry = self.adapters.get(record.adapter) or AdapterEntry(digest=record.adapter)
                self._change(record.adapter, drained=(*entry.drained, record))

    def _change(self, digest: str, **fields: object) -> None:
        entry = self.adapters.get(digest) or AdapterEntry(digest=digest)
        self.adapters[digest] = replace(entry, **fields)  # type: ignore[arg-type]
