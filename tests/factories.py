"""Values with defaults, so that each test states only what matters to it."""

from collections.abc import Iterable, Sequence
from itertools import count

from infra.settings import RouterSettings
from ledger.registry import Registry
from schemas.adapters import (
    AdapterApproved,
    AdapterManifest,
    AdapterSubmitted,
    Admission,
    AliasPointed,
    BaseAdded,
    BaseManifest,
    FileEntry,
    PoolConfigured,
    WorkerReady,
)
from schemas.digest import digest_of
from schemas.impersonation import Impersonation, SignedImpersonation
from schemas.jobs import JobSubmitted, Parameters
from schemas.keys import KeyPublished, KeyRole
from schemas.record import Record
from schemas.signing import SigningKey
from schemas.tenants import AliasGranted, AliasWithdrawn, TenantConfigured
from schemas.topics import ADAPTERS, ALIASES, KEYS, POOLS, TENANTS, WORKERS

# One of a kind for the whole run: what tests sign with.
KEYS_OF_ROLE = {role: SigningKey.generate(f"{role.value}-1", role) for role in KeyRole}
# Bases of tests have no tokenizer where the fake engine runs them.
IN_WORDS = RouterSettings(without_tokenizer="words")
_job_numbers = count(1)

# A record of the registry's topics: where it goes, under which key.
Entry = tuple[str, str, Record]


def make_job(job_id: str | None = None, alias: str = "support", tokens_max: int = 16, **fields: object) -> JobSubmitted:
    """A job with a prompt; ids differ unless one is given."""
    values: dict[str, object] = {
        "job_id": job_id or f"job-{next(_job_numbers)}",
        "alias": alias,
        "prompt": "Say something.",
        "parameters": Parameters(max_tokens=tokens_max),
        **fields,
    }
    return JobSubmitted.model_validate(values)


def make_file(name: str, content: bytes = b"content") -> FileEntry:
    return FileEntry(path=name, size=len(content), sha256=digest_of(content))


def make_base(name: str = "tiny", context_max: int = 1024) -> BaseAdded:
    """A base with its zero adapter, which `zero_of` gives."""
    manifest = BaseManifest(
        name=name,
        files=(make_file("model.safetensors", name.encode()),),
        tokenizer=digest_of(f"tokenizer of {name}".encode()),
        architecture="LlamaForCausalLM",
        layers=2,
        hidden=64,
        vocabulary=512,
        context_max=context_max,
        dtype="float32",
        modules={"layers.0.self_attn.q_proj": (64, 64)},
    )
    zero = make_manifest(manifest.digest, manifest.tokenizer, owner=None, name="zero")
    return BaseAdded(base=manifest.digest, manifest=manifest, zero_adapter=zero.digest)


def zero_of(base: BaseAdded) -> AdapterManifest:
    """The manifest of a base's zero adapter."""
    return make_manifest(base.base, base.manifest.tokenizer, owner=None, name="zero")


def make_manifest(
    base: str, tokenizer: str, owner: str | None = "acme", name: str = "adapter", rank: int = 4, max_replicas: int = 1
) -> AdapterManifest:
    """An adapter; another name is another content, hence another digest."""
    return AdapterManifest(
        owner=owner,
        base=base,
        tokenizer=tokenizer,
        files=(make_file("adapter_model.safetensors", name.encode()),),
        rank=rank,
        alpha="8",
        target_modules=("q_proj",),
        dtype="float32",
        max_replicas=max_replicas,
    )


def make_approved(manifest: AdapterManifest, key: SigningKey | None = None) -> AdapterApproved:
    """An adapter admitted by the registry's key."""
    signer = key or KEYS_OF_ROLE[KeyRole.REGISTRY]
    admission = Admission(
        adapter=manifest.digest, base=manifest.base, owner=manifest.owner, validator="tests", report=None
    )
    return AdapterApproved(
        adapter=manifest.digest,
        manifest=manifest,
        admission=admission,
        key_id=signer.key_id,
        signature=signer.sign(admission),
        approved_by="tests",
    )


def submitted(manifest: AdapterManifest) -> Entry:
    record = AdapterSubmitted(
        adapter=manifest.digest, manifest=manifest, alias=None, validator="tests", submitted_by="tests"
    )
    return ADAPTERS.name, manifest.digest, record


def approved(manifest: AdapterManifest, key: SigningKey | None = None) -> Entry:
    return ADAPTERS.name, manifest.digest, make_approved(manifest, key)


def pointed(tenant: str, alias: str, digest: str | None, alias_version: int = 1) -> Entry:
    record = AliasPointed(
        tenant=tenant, alias=alias, stable=digest, alias_version=alias_version, pointed_by="tests"
    )  # fmt: skip
    return ALIASES.name, f"{tenant}/{alias}", record


def granted(tenant: str, alias: str, **fields: object) -> Entry:
    values = {"tenant": tenant, "alias": alias, "entitlement": "tests", "granted_by": "tests", **fields}
    return TENANTS.name, tenant, AliasGranted.model_validate(values)


def withdrawn(tenant: str, alias: str) -> Entry:
    record = AliasWithdrawn(tenant=tenant, alias=alias, reason="tests", withdrawn_by="tests")
    return TENANTS.name, tenant, record


def configured(tenant: str, **fields: object) -> Entry:
    record = TenantConfigured.model_validate({"tenant": tenant, "configured_by": "tests", **fields})
    return TENANTS.name, tenant, record


def pool_of(
    base: str, pool: str = "main", rank_max: int = 8, context_max: int = 1024, partitions: int = 4, **fields: object
) -> Entry:
    values = {"rank_max": rank_max, "context_max": context_max, "partitions": partitions, **fields}
    return POOLS.name, pool, PoolConfigured.model_validate({"pool": pool, "base": base, **values})


def ready(
    base: str,
    worker: str = "worker-1",
    pool: str = "main",
    rows: int = 4,
    partitions: Sequence[int] = (0, 1, 2, 3),
    **fields: object,
) -> Entry:
    values = {"engine": "fake", "slots": 4, "rows": rows, "partitions": tuple(partitions), **fields}
    record = WorkerReady.model_validate({"worker": worker, "pool": pool, "base": base, **values})
    return WORKERS.name, worker, record


def everybody(_: WorkerReady) -> bool:
    """Whoever is ready is there."""
    return True


def published(key: SigningKey) -> Entry:
    record = KeyPublished(key_id=key.key_id, role=key.role, public_key=key.public_key)
    return KEYS.name, key.key_id, record


def make_grant(
    tenant: str, granted_at_ms: int, lasts_ms: int = 60_000, key: SigningKey | None = None
) -> SignedImpersonation:
    """What lets an operator act for this tenant, by the admin key unless another is given."""
    signer = key or KEYS_OF_ROLE[KeyRole.ADMIN]
    impersonation = Impersonation(
        grant_id="grant-0001",
        tenant=tenant,
        admin="eve",
        reason="ticket 7",
        granted_at_ms=granted_at_ms,
        expires_at_ms=granted_at_ms + lasts_ms,
        key_id=signer.key_id,
    )
    return SignedImpersonation(impersonation=impersonation, signature=signer.sign(impersonation))


def make_world(
    tenants: Iterable[str] = ("acme", "globex"), pool: str = "main", base: BaseAdded | None = None
) -> list[Entry]:
    """A base in a pool with a ready worker, and per tenant an approved adapter `support` and the base as `base`."""
    base = base or make_base()
    zero = zero_of(base)
    entries = [
        *(published(key) for key in KEYS_OF_ROLE.values()),
        (ADAPTERS.name, base.base, base),
        approved(zero),
        pool_of(base.base, pool),
        ready(base.base, pool=pool),
    ]
    for tenant in tenants:
        adapter = make_manifest(base.base, base.manifest.tokenizer, owner=tenant, name=f"support of {tenant}")
        entries += [configured(tenant), submitted(adapter), approved(adapter)]
        entries += [pointed(tenant, "support", adapter.digest), pointed(tenant, "base", zero.digest)]
    return entries


def make_registry(entries: Iterable[Entry] | None = None) -> Registry:
    """The view that folds these records, in order. What points an alias that was never granted grants it, too."""
    registry = Registry()
    for topic, _, record in with_grants(make_world() if entries is None else entries):
        registry.apply(topic, registry.positions.get(topic, 0), record.encode())
    return registry


def with_grants(entries: Iterable[Entry]) -> list[Entry]:
    """These records, and a grant for every alias that they point and do not speak of otherwise."""
    given = list(entries)
    spoken = {(r.tenant, r.alias) for _, _, r in given if isinstance(r, AliasGranted | AliasWithdrawn)}
    aliases = dict.fromkeys((r.tenant, r.alias) for _, _, r in given if isinstance(r, AliasPointed))
    return [*(granted(*pair) for pair in aliases if pair not in spoken), *given]
