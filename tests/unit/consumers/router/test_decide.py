"""Deny by default: who gets which digest, and in which words everyone else is refused."""

from collections.abc import Sequence

import pytest

from consumers.router.decide import Candidate, Context, Refusal, decide
from schemas.adapters import AdapterRevoked, WorkerGone
from schemas.jobs import JobClass, JobSubmitted, RejectReason
from schemas.keys import KeyRevoked, KeyRole
from schemas.record import RECORD_BYTES_MAX
from schemas.routing import home_partitions
from schemas.signing import SigningKey
from schemas.tenants import TenantState
from schemas.topics import ADAPTERS, KEYS, TENANTS, WORKERS
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
    ready,
    submitted,
    withdrawn,
    zero_of,
)
from tests.factories import granted as granted_alias

NOW_MS = 1_000_000
BASE = make_base()
SUPPORT = make_manifest(BASE.base, BASE.manifest.tokenizer, owner="acme", name="support of acme")
LEGAL = make_manifest(BASE.base, BASE.manifest.tokenizer, owner="globex", name="legal of globex")


def make_context(
    tenant: str = "acme",
    job_class: JobClass = JobClass.INTERACTIVE,
    timestamp_ms: int = NOW_MS,
    size_bytes: int = 100,
    prompt_tokens: int | str | None = 3,
    counted_by: str | None = BASE.manifest.tokenizer,
) -> Context:
    return Context(
        tenant=tenant,
        job_class=job_class,
        timestamp_ms=timestamp_ms,
        size_bytes=size_bytes,
        prompt_tokens=prompt_tokens,
        counted_by=counted_by,
        key_id="route-1",
    )


def decided(
    job: JobSubmitted, more: Sequence[Entry] = (), context: Context | None = None, now_ms: int = NOW_MS
) -> Candidate | Refusal:
    """The answer to a job of acme in the usual world and what was appended to it since."""
    return decide(job, context or make_context(), make_registry([*make_world(), *more]), now_ms, everybody)


def refused(
    job: JobSubmitted, more: Sequence[Entry] = (), context: Context | None = None, now_ms: int = NOW_MS
) -> Refusal:
    answer = decided(job, more, context, now_ms)
    assert isinstance(answer, Refusal)
    return answer


def granted(
    job: JobSubmitted, more: Sequence[Entry] = (), context: Context | None = None, now_ms: int = NOW_MS
) -> Candidate:
    answer = decided(job, more, context, now_ms)
    assert isinstance(answer, Candidate)
    return answer


def revoked(digest: str) -> Entry:
    return ADAPTERS.name, digest, AdapterRevoked(adapter=digest, reason="broken", revoked_by="tests")


def test_a_job_runs_under_the_digest_its_tenants_alias_points_at() -> None:
    decision = granted(make_job(alias="support")).decision
    assert decision.identity.adapter == SUPPORT.digest
    assert decision.identity.model_dump() == {
        "tenant": "acme", "base": BASE.base, "adapter": SUPPORT.digest, "tokenizer": BASE.manifest.tokenizer
    }  # fmt: skip


def test_a_job_for_the_base_runs_under_its_zero_adapter() -> None:
    assert granted(make_job(alias="base")).decision.identity.adapter == zero_of(BASE).digest


UNKNOWN: dict[str, tuple[str, list[Entry]]] = {
    "no such alias": ("nothing", []),
    "another tenant's alias": ("legal", [approved(LEGAL), pointed("globex", "legal", LEGAL.digest)]),
    "an alias of ours that points at another's adapter": (
        "stolen", [approved(LEGAL), pointed("acme", "stolen", LEGAL.digest)]
    ),
    "an adapter that is only submitted": ("new", [submitted(LEGAL), pointed("acme", "new", LEGAL.digest)]),
    "an adapter nobody has heard of": ("ghost", [pointed("acme", "ghost", f"sha256:{'0' * 64}")]),
    "a revoked adapter": ("support", [revoked(SUPPORT.digest)]),
    "an alias whose grant was withdrawn": ("support", [withdrawn("acme", "support")]),
    "a grant that is not in force yet": ("support", [granted_alias("acme", "support", not_before_ms=NOW_MS + 1)]),
    "a grant that has expired": ("support", [granted_alias("acme", "support", expires_at_ms=NOW_MS)]),
    "a grant for another class": ("support", [granted_alias("acme", "support", classes=(JobClass.BATCH,))]),
    "an alias that was taken away": ("support", [pointed("acme", "support", None, 2)]),
    "an adapter signed by another key": (
        "forged",
        [
            approved(
                make_manifest(BASE.base, BASE.manifest.tokenizer, name="forged"),
                SigningKey.generate("registry-1", KeyRole.REGISTRY),
            ),
            pointed("acme", "forged", make_manifest(BASE.base, BASE.manifest.tokenizer, name="forged").digest),
        ],
    ),
    "a registry key that was revoked": (
        "support", [(KEYS.name, "registry-1", KeyRevoked(key_id="registry-1", reason="lost"))]
    ),
    "a base that is not known": (
        "other",
        [
            approved(make_manifest(f"sha256:{'1' * 64}", BASE.manifest.tokenizer)),
            pointed("acme", "other", make_manifest(f"sha256:{'1' * 64}", BASE.manifest.tokenizer).digest),
        ],
    ),
    "a zero adapter of no base": (
        "zero",
        [
            approved(make_manifest(BASE.base, BASE.manifest.tokenizer, owner=None, name="not zero")),
            pointed("acme", "zero", make_manifest(BASE.base, BASE.manifest.tokenizer, None, "not zero").digest),
        ],
    ),
    "a path": ("../support", []),
    "a URL": ("https://example.org/support", []),
    "a NUL": ("support\x00", []),
    "a new line": ("support\n", []),
    "a percent escape": ("support%2Den", []),
    "a full-width dot": ("support\uff0een", []),
    "ten kilobytes": ("a" * 10_240, []),
    "nothing at all": ("", []),
    "a digest": (SUPPORT.digest, []),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_every_way_to_name_no_adapter_is_answered_in_the_same_words(case: str) -> None:
    alias, more = UNKNOWN[case]
    assert refused(make_job(alias=alias), more) == refused(make_job(alias="never-heard-of"))


def test_a_malformed_alias_is_refused_before_anything_is_looked_up() -> None:
    registry = make_registry([*make_world(), pointed("acme", "support", SUPPORT.digest)])
    registry.aliases["acme", "../support"] = registry.aliases["acme", "support"]
    assert isinstance(decide(make_job(alias="../support"), make_context(), registry, NOW_MS, everybody), Refusal)


REFUSALS: dict[str, tuple[JobSubmitted, list[Entry], Context, RejectReason]] = {
    "a tenant nobody configured": (
        make_job(), [], make_context(tenant="initech"), RejectReason.CLASS_NOT_GRANTED
    ),
    "a removed tenant": (
        make_job(), [configured("acme", state=TenantState.REMOVED)], make_context(), RejectReason.CLASS_NOT_GRANTED
    ),
    "a class that is not granted": (
        make_job(), [configured("acme", classes=(JobClass.BATCH,))], make_context(), RejectReason.CLASS_NOT_GRANTED
    ),
    "another tenant's name in the payload": (
        make_job(tenant="globex"), [], make_context(), RejectReason.TENANT_MISMATCH
    ),
    "more tokens than the tenant may": (
        make_job(tokens_max=65), [configured("acme", tokens_max=64)], make_context(), RejectReason.LIMIT_EXCEEDED
    ),
    "more tokens than any pool holds": (
        make_job(tokens_max=1024), [], make_context(), RejectReason.LIMIT_EXCEEDED
    ),
    "a record above the limit": (
        make_job(), [], make_context(size_bytes=RECORD_BYTES_MAX + 1), RejectReason.LIMIT_EXCEEDED
    ),
    "a deadline that passed": (
        make_job(deadline_ms=5), [], make_context(timestamp_ms=NOW_MS - 5), RejectReason.DEADLINE_PASSED
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_tenant_may_not_do_is_refused_with_its_reason(case: str) -> None:
    job, more, context, reason = REFUSALS[case]
    assert refused(job, more, context).reason is reason


def test_a_grant_bounds_the_tokens_of_a_job() -> None:
    bounded = [granted_alias("acme", "support", tokens_max=16)]
    assert isinstance(decided(make_job(tokens_max=16), bounded), Candidate)
    answer = decided(make_job(tokens_max=17), bounded)
    assert isinstance(answer, Refusal)
    assert answer.reason is RejectReason.LIMIT_EXCEEDED


def test_what_is_reserved_is_the_prompt_and_the_longest_answer() -> None:
    decision = granted(make_job(tokens_max=100), context=make_context(prompt_tokens=40)).decision
    assert (decision.limits.prompt_tokens, decision.limits.tokens_max, decision.reserve) == (40, 100, 140)


def test_a_prompt_that_leaves_no_room_in_any_pool_is_refused() -> None:
    assert refused(make_job(), context=make_context(prompt_tokens=1024)).reason is RejectReason.LIMIT_EXCEEDED
    assert granted(make_job(), context=make_context(prompt_tokens=1023)).decision.pool == "main"


def test_a_job_that_no_quota_of_its_tenant_ever_holds_is_refused_for_good() -> None:
    small = [configured("acme", tokens_per_minute=100)]
    assert refused(make_job(tokens_max=60), small, make_context(prompt_tokens=41)).reason is RejectReason.LIMIT_EXCEEDED
    assert granted(make_job(tokens_max=60), small, make_context(prompt_tokens=40)).decision.reserve == 100


def test_a_payload_that_names_its_own_tenant_is_taken() -> None:
    assert granted(make_job(tenant="acme")).decision.identity.tenant == "acme"


def test_without_a_pool_for_the_base_a_job_may_come_again() -> None:
    world = [entry for entry in make_world() if entry[0] != "pools"]
    answer = decide(make_job(), make_context(), make_registry(world), NOW_MS, everybody)
    assert isinstance(answer, Refusal)
    assert answer.reason is RejectReason.NOT_READY


def test_a_job_goes_to_the_smallest_served_pool_that_suffices() -> None:
    pools = [pool_of(BASE.base, "small", rank_max=4, context_max=512), pool_of(BASE.base, "tiny", rank_max=2)]
    served = [*pools, ready(BASE.base, "worker-2", "small"), ready(BASE.base, "worker-3", "tiny")]
    assert granted(make_job(tokens_max=100), served).decision.pool == "small"
    assert granted(make_job(tokens_max=512), served).decision.pool == "main"
    assert granted(make_job(tokens_max=100), pools).decision.pool == "main", "a larger one with a worker"


def test_without_any_worker_a_job_waits_for_the_smallest_pool() -> None:
    world = [entry for entry in make_world() if entry[0] != "workers"]
    small = pool_of(BASE.base, "small", rank_max=4, context_max=512)
    answer = decide(make_job(), make_context(), make_registry([*world, small]), NOW_MS, everybody)
    assert isinstance(answer, Candidate)
    assert (answer.decision.pool, answer.window_max) == ("small", 0)


def test_a_tenant_with_a_pool_of_its_own_is_served_there_alone_and_no_other_tenant_is() -> None:
    own = pool_of(BASE.base, "own", tenants=("acme",))
    others = pool_of(BASE.base, "others", rank_max=4, context_max=512, tenants=("globex",))
    more = [own, others, ready(BASE.base, "worker-2", "others")]
    assert granted(make_job(), more).decision.pool == "own"
    context = make_context(tenant="globex")
    assert granted(make_job(), more, context).decision.pool == "others"
    assert granted(make_job(), [others], make_context()).decision.pool == "main"


def test_a_reserved_part_of_a_pool_is_places_of_its_window() -> None:
    answer = granted(make_job(), [pool_of(BASE.base, "main", reserved={"globex": 25})])
    assert (answer.window_max, answer.reserved) == (8, {"globex": 2})


def test_a_pool_of_another_base_takes_nothing() -> None:
    other = pool_of(make_base("other").base, "aaa", rank_max=4, context_max=512)
    assert granted(make_job(), [other]).decision.pool == "main"


@pytest.mark.parametrize(
    ("job_class", "deadline_ms"), [(JobClass.INTERACTIVE, 120_000), (JobClass.BATCH, 24 * 3600 * 1000)]
)
def test_a_deadline_counts_from_the_brokers_timestamp_with_a_default_per_class(
    job_class: JobClass, deadline_ms: int
) -> None:
    context = make_context(job_class=job_class, timestamp_ms=NOW_MS - 7)
    assert granted(make_job(), context=context).decision.expires_at_ms == NOW_MS - 7 + deadline_ms
    assert granted(make_job(deadline_ms=9), context=context).decision.expires_at_ms == NOW_MS + 2


def test_the_window_is_twice_the_rows_of_the_ready_owner() -> None:
    assert granted(make_job()).window_max == 8
    newer = ready(BASE.base, worker="worker-2", rows=16)
    assert granted(make_job(), [newer]).window_max == 32


def test_without_a_ready_owner_the_window_is_zero() -> None:
    world = [entry for entry in make_world() if entry[0] != "workers"]
    answer = decide(make_job(), make_context(), make_registry(world), NOW_MS, everybody)
    assert isinstance(answer, Candidate)
    assert answer.window_max == 0


def test_a_killed_worker_does_not_come_back_when_its_successor_leaves() -> None:
    newer = ready(BASE.base, worker="worker-2", rows=16)
    gone = (WORKERS.name, "worker-2", WorkerGone(worker="worker-2", pool="main"))
    assert granted(make_job(), [newer, gone]).window_max == 0


def test_a_job_goes_to_a_home_partition_of_its_digest_and_always_to_the_same() -> None:
    wide = make_manifest(BASE.base, BASE.manifest.tokenizer, name="wide", max_replicas=2)
    more = [approved(wide), pointed("acme", "wide", wide.digest)]
    jobs = [make_job(alias="wide") for _ in range(40)]
    partitions = {job.job_id: granted(job, more).decision.partition for job in jobs}
    assert set(partitions.values()) == set(home_partitions(wide.digest, 4, 2))
    assert partitions == {job.job_id: granted(job, more).decision.partition for job in jobs}


def test_a_decision_says_where_the_view_stood_and_who_will_sign() -> None:
    registry = make_registry()
    answer = decide(make_job(), make_context(), registry, NOW_MS, everybody)
    assert isinstance(answer, Candidate)
    assert answer.decision.decided_on == registry.positions
    assert answer.decision.decided_on is not registry.positions
    assert answer.decision.key_id == "route-1"


def test_a_later_configuration_of_a_tenant_replaces_the_earlier_one() -> None:
    assert (
        granted(make_job(), [(TENANTS.name, "acme", configured("acme", concurrency_max=3)[2])]).tenant.concurrency_max
        == 3
    )


def test_without_a_count_by_the_bases_own_tokenizer_nothing_is_admitted() -> None:
    for context in (make_context(prompt_tokens=None), make_context(counted_by="sha256:" + "0" * 64)):
        assert refused(make_job(), context=context).reason is RejectReason.NOT_READY


def test_what_is_wrong_with_a_prompt_is_said_only_where_the_alias_is_known() -> None:
    context = make_context(prompt_tokens="the prompt is odd")
    assert refused(make_job(), context=context).message == "the prompt is odd"
    assert refused(make_job(), context=context).reason is RejectReason.LIMIT_EXCEEDED
    for alias, more in (("nothing", []), ("support", [withdrawn("acme", "support")])):
        for unclear in (context, make_context(prompt_tokens=None)):
            assert refused(make_job(alias=alias), more, unclear).reason is RejectReason.UNKNOWN_ALIAS


def test_a_job_that_was_never_counted_ends_at_its_deadline_too() -> None:
    late = make_context(prompt_tokens=None, timestamp_ms=NOW_MS - 10)
    assert refused(make_job(deadline_ms=10), context=late).reason is RejectReason.DEADLINE_PASSED
