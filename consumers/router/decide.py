"""Under which digest a job would run, or why it is refused. Pure, and denies by default: no default adapter exists."""

from dataclasses import dataclass

from ledger.answers import Decision
from ledger.registry import Present, Registry
from schemas.acting import acting_problem
from schemas.adapters import AdapterManifest, PoolConfigured
from schemas.ids import is_alias
from schemas.jobs import JobClass, JobSubmitted, Limits, RejectReason, tenant_job
from schemas.keys import KeyRole
from schemas.record import RECORD_BYTES_MAX, Identity
from schemas.routing import partition_of
from schemas.tenants import TenantConfigured, TenantState

# One answer to a name that does not exist, is malformed, is another's, is not approved yet or was revoked.
UNKNOWN_ALIAS = "this tenant has no such alias"
UNCOUNTED = "prompts for this base cannot be counted now; send the job again later"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the log says of a job, whatever the job says of itself: the tenant is the topic's."""

    tenant: str
    job_class: JobClass
    timestamp_ms: int
    size_bytes: int
    # As counted, or a sentence for the tenant, or None for now; and by which base's tokenizer.
    prompt_tokens: int | str | None
    counted_by: str | None
    # The key that will sign the route.
    key_id: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A job that may run, where the ledger has a place for it."""

    decision: Decision
    tenant: TenantConfigured
    window_max: int
    #: Places of the window that are held for one tenant each.
    reserved: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a job may not run, in words for its tenant."""

    reason: RejectReason
    message: str


def decide(
    job: JobSubmitted, context: Context, registry: Registry, now_ms: int, present: Present
) -> Candidate | Refusal:
    """Everything about a job but whether there is a place for it."""
    tenant = registry.tenants.get(context.tenant)
    if tenant is None or tenant.state is not TenantState.ACTIVE or context.job_class not in tenant.classes:
        return _refuse(RejectReason.CLASS_NOT_GRANTED, f"this tenant has no grant for {context.job_class} jobs")
    if job.tenant is not None and job.tenant != context.tenant:
        return _refuse(RejectReason.TENANT_MISMATCH, "'tenant' is not the one whose topic this is; leave it out")
    if job.impersonation is not None:
        # By the broker's time: a job that waited was allowed when it came.
        keys = registry.keys(KeyRole.ADMIN)
        problem = acting_problem(job.impersonation, context.tenant, context.timestamp_ms, keys)
        if problem is not None:
            return _refuse(RejectReason.IMPERSONATION, problem)
    grant = registry.grant_for(context.tenant, job.alias, context.job_class, now_ms)
    digest = _digest_of(job.alias, context.tenant, registry) if grant is not None else None
    manifest = registry.adapters[digest].manifest if digest is not None else None
    if digest is None or manifest is None or grant is None:
        return _refuse(RejectReason.UNKNOWN_ALIAS, UNKNOWN_ALIAS)
    if context.size_bytes > RECORD_BYTES_MAX:
        return _limit(f"the record has {context.size_bytes} bytes; at most {RECORD_BYTES_MAX} are taken")
    tokens_max = min(tenant.tokens_max, grant.tokens_max or tenant.tokens_max)
    if job.parameters.max_tokens > tokens_max:
        return _limit(f"max_tokens is {job.parameters.max_tokens}; this tenant's limit is {tokens_max}")
    expires_at_ms = context.timestamp_ms + (job.deadline_ms or _deadline_ms(tenant, context.job_class))
    if now_ms >= expires_at_ms:
        return _refuse(RejectReason.DEADLINE_PASSED, "the deadline passed before the job was admitted")
    prompt_tokens = _prompt_tokens(context, manifest)
    if isinstance(prompt_tokens, Refusal):
        return prompt_tokens
    reserve = prompt_tokens + job.parameters.max_tokens
    if reserve > min(tenant.tokens_per_minute, tenant.tokens_per_day):
        return _limit(f"prompt and answer may have {reserve} tokens; this tenant's quota never holds as many")
    needed = (prompt_tokens, job.parameters.max_tokens)
    pool = _pool_for(manifest, context.tenant, needed, registry, present)
    if isinstance(pool, Refusal):
        return pool
    partition = partition_of(digest, tenant_job(context.tenant, job.job_id), pool.partitions, manifest.max_replicas)
    window_max = registry.window_of(pool.pool, partition, present)
    decision = Decision(
        identity=Identity(
            tenant=context.tenant, base=manifest.base, adapter=digest, tokenizer=manifest.tokenizer
        ),
        job_class=context.job_class,
        alias=job.alias,
        pool=pool.pool,
        partition=partition,
        limits=Limits(
            tokens_max=job.parameters.max_tokens,
            context_max=pool.context_max,
            prompt_tokens=prompt_tokens,
        ),
        decided_on=dict(registry.positions),
        expires_at_ms=expires_at_ms,
        weight=tenant.weight,
        key_id=context.key_id,
    )  # fmt: skip
    return Candidate(
        decision=decision,
        tenant=tenant,
        window_max=window_max,
        reserved={name: window_max * percent // 100 for name, percent in pool.reserved.items()},
    )


def _digest_of(alias: str, tenant: str, registry: Registry) -> str | None:
    """The approved adapter behind a tenant's alias. Every way to have none looks the same from outside."""
    if not is_alias(alias):
        return None
    pointed = registry.aliases.get((tenant, alias))
    if pointed is None or pointed.stable is None or registry.admission_problem(pointed.stable) is not None:
        return None
    manifest = registry.adapters[pointed.stable].manifest
    base = registry.bases.get(manifest.base) if manifest is not None else None
    if manifest is None or base is None or base.manifest.tokenizer != manifest.tokenizer:
        return None
    platforms = manifest.owner is None and base.zero_adapter == pointed.stable
    return pointed.stable if manifest.owner == tenant or platforms else None


def _prompt_tokens(context: Context, manifest: AdapterManifest) -> int | Refusal:
    """Said only to whom the alias is known. No count, or one by a tokenizer that is not the base's, allows nothing."""
    if context.prompt_tokens is None or context.counted_by != manifest.tokenizer:
        return _refuse(RejectReason.NOT_READY, UNCOUNTED)
    return _limit(context.prompt_tokens) if isinstance(context.prompt_tokens, str) else context.prompt_tokens


def _pool_for(
    manifest: AdapterManifest, tenant: str, needed: tuple[int, int], registry: Registry, present: Present
) -> PoolConfigured | Refusal:
    """The smallest pool that suffices and has a worker; without one, the smallest. Needed: tokens of prompt and answer.

    A tenant that has pools of its own on this base is served there alone. An answer that would not fit behind its
    prompt is cut by the engine, where the prompt leaves room for a token.
    """
    on_base = [pool for pool in registry.pools.values() if pool.base == manifest.base]
    own = [pool for pool in on_base if pool.tenants is not None and tenant in pool.tenants]
    able = [p for p in own or on_base if p.rank_max >= manifest.rank and (own or p.tenants is None)]
    if not able:
        return _refuse(RejectReason.NOT_READY, "no pool of workers serves this adapter yet")
    enough = [pool for pool in able if pool.context_max > max(needed)]
    if not enough:
        longest = max(pool.context_max for pool in able)
        asked = f"the prompt has {needed[0]} tokens and max_tokens is {needed[1]}"
        return _limit(f"{asked}; prompt and answer together have at most {longest} tokens")
    if len(enough) == 1:
        return enough[0]
    served = {worker.pool for worker in registry.serving() if present(worker)}

    def order(pool: PoolConfigured) -> tuple[bool, bool, int, int, str]:
        return pool.pool not in served, pool.context_max < sum(needed), pool.rank_max, pool.context_max, pool.pool

    return min(enough, key=order)


def _deadline_ms(tenant: TenantConfigured, job_class: JobClass) -> int:
    return tenant.interactive_deadline_ms if job_class is JobClass.INTERACTIVE else tenant.batch_deadline_ms


def _limit(message: str) -> Refusal:
    return _refuse(RejectReason.LIMIT_EXCEEDED, message)


def _refuse(reason: RejectReason, message: str) -> Refusal:
    return Refusal(reason=reason, message=message)
