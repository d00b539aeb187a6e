"""Signed requests as a router writes them, for tests of the worker."""

from collections.abc import Mapping

from ledger.registry import Registry
from schemas.jobs import JobClass, JobSubmitted, Limits, RequestRouted, Route
from schemas.keys import KeyRole
from schemas.record import Coordinates, Identity
from schemas.routing import partition_of
from schemas.signing import SigningKey
from tests.factories import KEYS_OF_ROLE, make_job

FAR_MS = 2**42
_offsets = iter(range(1, 10**9))


def make_route(
    registry: Registry,
    job: JobSubmitted | None = None,
    tenant: str = "acme",
    pool: str = "main",
    key: SigningKey | None = None,
    partitions: int = 4,
    **fields: object,
) -> RequestRouted:
    """A route to what the tenant's alias points at now. `fields` replace the route's own, before it is signed."""
    job = job or make_job()
    signer = key or KEYS_OF_ROLE[KeyRole.ROUTE]
    digest = registry.aliases[tenant, job.alias].stable or ""
    approved = registry.adapters[digest].approved
    assert approved is not None
    base, tokenizer = approved.manifest.base, approved.manifest.tokenizer
    values: dict[str, object] = {
        "identity": Identity(tenant=tenant, base=base, adapter=digest, tokenizer=tokenizer),
        "job_id": job.job_id,
        "job_class": JobClass.INTERACTIVE,
        "alias": job.alias,
        "body_hash": job.body_hash,
        "ingress": Coordinates(topic=f"jobs.{tenant}", partition=0, offset=next(_offsets)),
        "pool": pool,
        "partition": partition_of(digest, job.job_id, partitions, 1),
        "limits": Limits(tokens_max=64, context_max=512),
        "decided_on": {},
        "ledger_epoch": 1,
        "admitted_at_us": 1,
        "expires_at_ms": FAR_MS,
        "key_id": signer.key_id,
        **fields,
    }
    return signed(Route.model_validate(values), job, signer)


def signed(route: Route, job: JobSubmitted, key: SigningKey | None = None) -> RequestRouted:
    signer = key or KEYS_OF_ROLE[KeyRole.ROUTE]
    return RequestRouted(route=route, signature=signer.sign(route), job=job)


def changed(request: RequestRouted, fields: Mapping[str, object]) -> RequestRouted:
    """The request with another route under the old signature: a forgery."""
    return request.model_copy(update={"route": request.route.model_copy(update=dict(fields))})
