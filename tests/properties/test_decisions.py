"""Law: nobody ever gets another tenant's adapter, whatever the log and the job say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.router.decide import Candidate, Context, decide
from schemas.adapters import AdapterRevoked
from schemas.jobs import JobClass
from schemas.topics import ADAPTERS
from tests.factories import (
    Entry,
    approved,
    configured,
    everybody,
    make_base,
    make_job,
    make_manifest,
    make_registry,
    make_world,
    pointed,
    pool_of,
    submitted,
    zero_of,
)

TENANTS = ("acme", "globex", "initech")
ALIASES = ("support", "legal", "base", "a/b", "ünknown")
BASES = tuple(make_base(name) for name in ("tiny", "other"))
MANIFESTS = [
    make_manifest(base.base, base.manifest.tokenizer, owner=owner, name=f"{owner} {number}", rank=rank)
    for base in BASES
    for owner in (*TENANTS, None)
    for number, rank in enumerate((2, 16))
]
EVERY = {manifest.digest: manifest for manifest in [*MANIFESTS, *(zero_of(base) for base in BASES)]}
ZEROS = {zero_of(base).digest for base in BASES}


def revoked(digest: str) -> Entry:
    return ADAPTERS.name, digest, AdapterRevoked(adapter=digest, reason="any", revoked_by="tests")


manifests = st.sampled_from(list(EVERY.values()))
entries = st.lists(
    st.one_of(
        manifests.map(approved),
        manifests.map(submitted),
        manifests.map(lambda manifest: revoked(manifest.digest)),
        st.builds(pointed, st.sampled_from(TENANTS), st.sampled_from(ALIASES[:3]), st.sampled_from([*EVERY, None])),
        st.builds(configured, st.sampled_from(TENANTS)),
        st.builds(pool_of, st.sampled_from([base.base for base in BASES]), st.sampled_from(("main", "wide"))),
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(
    more=entries,
    tenant=st.sampled_from(TENANTS),
    alias=st.sampled_from(ALIASES),
    claimed=st.sampled_from((None, *TENANTS)),
    job_class=st.sampled_from(JobClass),
    counted_by=st.sampled_from([base.manifest.tokenizer for base in BASES]),
)
def test_whoever_is_admitted_runs_its_own_approved_adapter_or_the_bases_zero_adapter(
    more: list[Entry], tenant: str, alias: str, claimed: str | None, job_class: JobClass, counted_by: str
) -> None:
    registry = make_registry([*make_world(), *more])
    context = Context(
        tenant=tenant,
        job_class=job_class,
        timestamp_ms=0,
        size_bytes=1,
        prompt_tokens=3,
        counted_by=counted_by,
        key_id="route-1",
    )
    answer = decide(make_job(alias=alias, tenant=claimed), context, registry, 1, everybody)
    if not isinstance(answer, Candidate):
        return
    identity, digest = answer.decision.identity, answer.decision.identity.adapter
    manifest = registry.adapters[digest].manifest
    assert manifest is not None
    assert manifest.owner == tenant or digest in ZEROS
    assert registry.adapters[digest].serves
    assert identity.tenant == tenant
    assert identity.tokenizer == counted_by
    assert identity.base == manifest.base == registry.pools[answer.decision.pool].base
    assert registry.pools[answer.decision.pool].rank_max >= manifest.rank
    assert claimed in (None, tenant)
