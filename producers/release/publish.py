"""The life of an adapter: submit, approve, point an alias, revoke. Each step may be repeated without harm."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts import hash_file
from infra.keys import load_key
from ledger.registry import AdapterEntry, Registry
from producers.release.desk import Desk
from producers.release.inspect import Question
from producers.release.intake import VALIDATOR, Refused, hashed, inspected, store
from schemas.adapters import (
    AdapterApproved,
    AdapterManifest,
    AdapterRevoked,
    AdapterSubmitted,
    Admission,
    AliasPointed,
)
from schemas.digest import digest_of
from schemas.errors import SwitchyardError
from schemas.ids import parse_alias
from schemas.keys import KeyRole
from schemas.tenants import AliasGranted, TenantConfigured
from schemas.topics import ADAPTERS, ALIASES, TENANTS

POLL_SECONDS = 1.0
REPORT_BYTES_MAX = 64 << 20

Say = Callable[[str], None]


class NotApproved(SwitchyardError):
    """The adapter cannot be approved."""


class NotRevocable(SwitchyardError):
    """This is a base's zero adapter: without it the base serves nobody. Take a tenant's alias away instead."""


class NotDrained(SwitchyardError):
    """The adapter is revoked, but not every worker has said that it is gone."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a release engineer hands in. `base` is a name or a digest."""

    directory: Path
    tenant: str
    alias: str | None
    base: str
    training_data_version: str | None = None
    evaluation_report: Path | None = None
    max_replicas: int = 1


async def submit(desk: Desk, submission: Submission) -> AdapterManifest:
    """Inspect, store and announce an adapter. The same bytes give the same digest and no second record.

    Raises Refused with a sentence for every problem, Unknown, InvalidName, ArtifactBroken.
    """
    tenant = desk.tenant(submission.tenant).tenant
    alias = None if submission.alias is None else parse_alias(submission.alias)
    base = desk.base(submission.base)
    question = Question(modules=base.manifest.modules, rank_max=rank_limit(desk.registry, base.base))
    report = await _stored_report(desk, submission.evaluation_report)
    async with inspected(submission.directory, question) as (copy, answer):
        files = await hashed(copy)
        manifest = AdapterManifest(
            owner=tenant,
            base=base.base,
            tokenizer=base.manifest.tokenizer,
            files=files,
            rank=answer.rank,
            alpha=answer.alpha,
            target_modules=answer.target_modules,
            dtype=answer.dtype,  # type: ignore[arg-type]  # one of three, as the manifest checks
            max_replicas=submission.max_replicas,
            training_data_version=submission.training_data_version,
            evaluation_report=report,
        )
        _refuse_revoked(desk.registry.adapters.get(manifest.digest))
        _refuse_beyond(manifest, desk.tenant(submission.tenant))
        await store(desk.objects, copy, files, manifest.encode())
    await _announce(desk, manifest, alias)
    return manifest


def _refuse_beyond(manifest: AdapterManifest, tenant: TenantConfigured) -> None:
    """What one adapter of a tenant may be. Raises Refused."""
    limits = (
        ("bytes", sum(entry.size for entry in manifest.files), tenant.adapter_bytes_max),
        ("rank", manifest.rank, tenant.adapter_rank_max),
        ("max_replicas", manifest.max_replicas, tenant.adapter_replicas_max),
    )
    problems = [f"{name}: {has}; an adapter of this tenant may have {most}" for name, has, most in limits if has > most]
    if problems:
        raise Refused(problems)


async def approve(desk: Desk, digest: str, wait_seconds: float = 0.0, say: Say = lambda _: None) -> AdapterApproved:
    """Admit an adapter that passed its gate, and point the alias that it was submitted for.

    Waits for the gate's report at most `wait_seconds`. Raises NotApproved with the reason.
    """
    submitted = desk.adapter(digest).submitted
    if submitted is None:
        raise NotApproved(f"{digest} was never submitted")
    _refuse_revoked(desk.adapter(digest))

    def reported() -> bool:
        return desk.registry.report_problem(digest) is None

    await _wait_for(reported, desk, wait_seconds, "waiting for the gate", say)
    report = passed_report(desk.registry, desk.adapter(digest))
    approved = desk.adapter(digest).approved
    if approved is None or desk.registry.admission_problem(digest) is not None:
        # A registry key that was revoked takes its admissions with it: the next one signs anew.
        approved = await admit(desk, submitted.manifest, report)
    if submitted.alias is not None and submitted.manifest.owner is not None:
        await point(desk, submitted.manifest.owner, submitted.alias, digest)
    return approved


async def admit(desk: Desk, manifest: AdapterManifest, report: str | None) -> AdapterApproved:
    """Sign and append an admission. `report` is the digest of the gate's report, None for a zero adapter."""
    key = load_key(desk.keys, KeyRole.REGISTRY)
    admission = Admission(
        adapter=manifest.digest, base=manifest.base, owner=manifest.owner, validator=VALIDATOR, report=report
    )
    approved = AdapterApproved(
        adapter=manifest.digest,
        manifest=manifest,
        admission=admission,
        key_id=key.key_id,
        signature=key.sign(admission),
        approved_by=desk.actor,
    )
    await desk.append(ADAPTERS.name, manifest.digest, approved)
    problem = desk.registry.admission_problem(manifest.digest)
    if problem is not None:
        raise NotApproved(f"the admission was appended but is not believed ({problem}): is {key.key_id} published?")
    return approved


async def point(desk: Desk, tenant: str, alias: str, digest: str | None) -> AliasPointed:
    """Point a tenant's alias at a digest, or take it away. Nothing is appended where it points there already.

    An alias that was never granted is granted with it; one whose grant was withdrawn or has expired is not again.
    """
    current = desk.registry.aliases.get((desk.tenant(tenant).tenant, parse_alias(alias)))
    if digest is not None and (tenant, alias) not in desk.registry.ever_granted:
        granted = AliasGranted(tenant=tenant, alias=alias, entitlement="with its adapter", granted_by=desk.actor)
        await desk.append(TENANTS.name, tenant, granted)
    if current is not None and current.stable == digest and current.candidate is None:
        return current
    pointed = AliasPointed(
        tenant=tenant,
        alias=alias,
        stable=digest,
        alias_version=current.alias_version + 1 if current else 1,
        pointed_by=desk.actor,
    )
    await desk.append(ALIASES.name, f"{tenant}/{alias}", pointed)
    return pointed


async def revoke(
    desk: Desk, digest: str, reason: str, wait_seconds: float = 0.0, say: Say = lambda _: None
) -> tuple[str, ...]:
    """Revoke an adapter for ever and wait for the receipts of the workers of its base; returns who gave one.

    Raises NotDrained naming the workers that did not answer within `wait_seconds`, and NotRevocable.
    """
    entry = desk.adapter(digest)
    if entry.manifest is not None and entry.manifest.owner is None:
        raise NotRevocable
    if entry.revoked is None:
        revoked = AdapterRevoked(adapter=digest, reason=reason, revoked_by=desk.actor)
        await desk.append(ADAPTERS.name, digest, revoked)
    await _wait_for(lambda: not undrained(desk.registry, digest), desk, wait_seconds, "waiting for the workers", say)
    missing = undrained(desk.registry, digest)
    if missing and wait_seconds > 0:
        raise NotDrained(f"{digest} is revoked, but there is no receipt yet from {', '.join(missing)}")
    return tuple(sorted({receipt.worker for receipt in desk.adapter(digest).drained}))


def undrained(registry: Registry, digest: str) -> list[str]:
    """Workers of the adapter's base without a receipt. A silent one counts as gone once others own its partitions."""
    entry = registry.adapters[digest]
    receipts = {receipt.worker for receipt in entry.drained}
    manifest = entry.manifest
    return sorted(
        name
        for name, worker in registry.workers.items()
        if manifest is not None
        and worker.base == manifest.base
        and name not in receipts
        and any(registry.owner_of(worker.pool, partition) == worker for partition in worker.partitions)
    )


def passed_report(registry: Registry, entry: AdapterEntry) -> str:
    """The digest of the gate's passed and signed report. Raises NotApproved."""
    gated = entry.gated
    if gated is None:
        raise NotApproved("the gate has not reported on this adapter yet; wait for it with --wait SECONDS")
    problem = registry.report_problem(entry.digest)
    if problem is not None:
        raise NotApproved(f"the gate's report is not believed: {problem}")
    if not gated.report.passed:
        raise NotApproved("the gate failed this adapter:\n" + "\n".join(f"- {p}" for p in gated.report.problems))
    return digest_of(gated.report.signed_bytes())


def rank_limit(registry: Registry, base: str) -> int:
    """The largest rank that a pool of this base serves. Raises NotApproved when it has no pool."""
    ranks = [pool.rank_max for pool in registry.pools.values() if pool.base == base]
    if not ranks:
        raise NotApproved("no pool serves this base; make one with: switchyard pool set POOL --base BASE")
    return max(ranks)


async def _stored_report(desk: Desk, path: Path | None) -> str | None:
    if path is None:
        return None
    await asyncio.to_thread(hash_file, path, REPORT_BYTES_MAX)
    return await desk.objects.put(path)


def _refuse_revoked(entry: AdapterEntry | None) -> None:
    if entry is not None and entry.revoked is not None:
        raise NotApproved(f"{entry.digest} was revoked, which is for ever: {entry.revoked.reason}")


async def _announce(desk: Desk, manifest: AdapterManifest, alias: str | None) -> None:
    known = desk.registry.adapters.get(manifest.digest)
    if known is not None and known.submitted is not None and known.submitted.alias == alias:
        return
    submitted = AdapterSubmitted(
        adapter=manifest.digest, manifest=manifest, alias=alias, validator=VALIDATOR, submitted_by=desk.actor
    )
    await desk.append(ADAPTERS.name, manifest.digest, submitted)


async def _wait_for(condition: Callable[[], bool], desk: Desk, seconds: float, doing: str, say: Say) -> None:
    """Wait for the view to show something, or for the time to pass; say once a second that it is being waited for."""
    waited = 0.0
    while not condition() and waited < seconds:
        say(f"{doing} ({waited:.0f} of {seconds:.0f} s)")
        step = min(POLL_SECONDS, seconds - waited)
        await desk.view.wait_until(condition, step)
        waited += step
