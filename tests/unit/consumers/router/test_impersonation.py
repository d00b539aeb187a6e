"""Acting in a tenant's name: one grant is believed, every other is refused in words of its own."""

import pytest

from consumers.router.decide import Candidate, Context, Refusal, decide
from schemas.adapters import AdapterRevoked
from schemas.audit import Admitted, Impersonated, Rejected
from schemas.impersonation import IMPERSONATION_MS_MAX, SignedImpersonation
from schemas.jobs import JobClass, RejectReason
from schemas.keys import KeyRevoked, KeyRole
from schemas.signing import SigningKey
from schemas.tenants import TenantState
from schemas.topics import ADAPTERS, KEYS
from tests.desk import Desk, reply_of, request_of
from tests.factories import (
    KEYS_OF_ROLE,
    Entry,
    configured,
    everybody,
    make_base,
    make_grant,
    make_job,
    make_registry,
    make_world,
    published,
)
from tests.fakes_ledger import START_MS

# When the broker took the job.
NOW_MS = 10_000_000_000
GOOD = make_grant("acme", NOW_MS - 1_000)
OLD_KEY = SigningKey.generate("admin-7", KeyRole.ADMIN)
REVOKED = KeyRevoked(key_id="admin-7", reason="lost")
NOT_SIGNED = "the grant is not signed by an admin key that is published and not revoked"
TOO_LONG = "the grant lasts longer than 60 minutes"


def changed(**fields: object) -> SignedImpersonation:
    """The good grant with other words under the same signature."""
    return GOOD.model_copy(update={"impersonation": GOOD.impersonation.model_copy(update=fields)})


def decided(
    grant: SignedImpersonation | None, *more: Entry, alias: str = "support", now_ms: int = NOW_MS
) -> Candidate | Refusal:
    context = Context(
        tenant="acme",
        job_class=JobClass.BATCH,
        timestamp_ms=NOW_MS,
        size_bytes=100,
        prompt_tokens=3,
        counted_by=make_base().manifest.tokenizer,
        key_id="route-1",
    )
    job = make_job(alias=alias, impersonation=grant)
    return decide(job, context, make_registry([*make_world(), *more]), now_ms, everybody)


def test_a_job_with_a_grant_in_force_runs_as_the_tenants_own_job() -> None:
    with_grant, without = decided(GOOD), decided(None)
    assert isinstance(with_grant, Candidate)
    assert isinstance(without, Candidate)
    assert with_grant.decision.identity == without.decision.identity
    assert (with_grant.tenant, with_grant.window_max) == (without.tenant, without.window_max)


@pytest.mark.parametrize(
    "grant",
    [
        make_grant("acme", NOW_MS),
        make_grant("acme", NOW_MS + 60_000),
        make_grant("acme", NOW_MS - 60_000 + 1, 60_000),
        make_grant("acme", NOW_MS - 5, IMPERSONATION_MS_MAX),
    ],
)
def test_at_the_edges_it_is_still_in_force(grant: SignedImpersonation) -> None:
    assert isinstance(decided(grant), Candidate)


def test_a_job_that_waited_was_allowed_when_the_broker_took_it() -> None:
    assert isinstance(decided(GOOD, now_ms=GOOD.impersonation.expires_at_ms + 1), Candidate)


REFUSED: dict[str, tuple[SignedImpersonation, list[Entry], str]] = {
    "expired": (make_grant("acme", NOW_MS - 60_000, 60_000), [], "the grant has expired"),
    "for next year": (make_grant("acme", NOW_MS + 60_001), [], "the grant is not in force yet"),
    "ends before it begins": (make_grant("acme", NOW_MS, -1), [], "the grant has expired"),
    "too long": (make_grant("acme", NOW_MS, IMPERSONATION_MS_MAX + 1), [], TOO_LONG),
    "too long, stretched afterwards": (changed(expires_at_ms=NOW_MS + IMPERSONATION_MS_MAX), [], TOO_LONG),
    "another tenant's": (make_grant("globex", NOW_MS), [], "the grant is for another tenant"),
    "another tenant's, renamed": (
        make_grant("globex", NOW_MS).model_copy(update={"impersonation": GOOD.impersonation}), [], NOT_SIGNED
    ),
    "prolonged": (changed(expires_at_ms=GOOD.impersonation.expires_at_ms + 1), [], NOT_SIGNED),
    "another reason": (changed(reason="none"), [], NOT_SIGNED),
    "another admin": (changed(admin="mallory"), [], NOT_SIGNED),
    "no signature": (GOOD.model_copy(update={"signature": ""}), [], NOT_SIGNED),
    "a stranger's key of the same name": (
        make_grant("acme", NOW_MS, key=SigningKey.generate("admin-1", KeyRole.ADMIN)), [], NOT_SIGNED
    ),
    "a key nobody published": (make_grant("acme", NOW_MS, key=OLD_KEY), [], NOT_SIGNED),
    "a key that was revoked": (
        make_grant("acme", NOW_MS, key=OLD_KEY),
        [published(OLD_KEY), (KEYS.name, "admin-7", REVOKED)],
        NOT_SIGNED,
    ),
    **{
        f"a key of role {role}": (make_grant("acme", NOW_MS, key=KEYS_OF_ROLE[role]), [], NOT_SIGNED)
        for role in KeyRole
        if role is not KeyRole.ADMIN
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_grant_is_refused_for_good_and_says_which_check_failed(case: str) -> None:
    grant, more, words = REFUSED[case]
    assert decided(grant, *more) == Refusal(reason=RejectReason.IMPERSONATION, message=words)


def test_a_key_is_believed_until_it_is_revoked() -> None:
    assert isinstance(decided(make_grant("acme", NOW_MS, key=OLD_KEY), published(OLD_KEY)), Candidate)


def test_a_bad_grant_learns_nothing_of_the_tenants_aliases() -> None:
    bad = make_grant("globex", NOW_MS)
    assert decided(bad, alias="support") == decided(bad, alias="never-heard-of")


def test_a_grant_opens_nothing_that_the_tenant_itself_may_not_use() -> None:
    unknown = decided(GOOD, alias="never-heard-of")
    assert isinstance(unknown, Refusal)
    assert unknown.reason is RejectReason.UNKNOWN_ALIAS
    removed = decided(GOOD, configured("acme", state=TenantState.REMOVED))
    assert isinstance(removed, Refusal)
    assert removed.reason is RejectReason.CLASS_NOT_GRANTED


async def test_the_audit_says_who_acts_why_and_until_when_before_it_says_admitted() -> None:
    desk, grant = Desk(), make_grant("acme", START_MS)
    job = make_job(impersonation=grant)
    effect = await desk.post(job)
    assert effect is not None
    (first_key, first), (second_key, second) = effect.audit
    assert isinstance(first, Impersonated)
    assert isinstance(second, Admitted)
    assert first_key == second_key == second.identity.adapter
    assert first.impersonation == second.impersonation == grant.impersonation
    assert (first.identity, first.job_id, first.ingress) == (second.identity, job.job_id, second.ingress)
    assert request_of(effect).job == job


async def test_the_tenants_own_job_says_nothing_of_it() -> None:
    effect = await Desk().post(make_job())
    assert effect is not None
    ((_, admitted),) = effect.audit
    assert isinstance(admitted, Admitted)
    assert admitted.impersonation is None


async def test_a_job_that_is_delivered_again_after_its_key_was_revoked_is_told_the_same() -> None:
    desk = Desk()
    work = desk.work(make_job(impersonation=make_grant("acme", START_MS)))
    first = await desk.answer(work)
    adapter = request_of(first).route.identity.adapter
    desk.registry.apply(KEYS.name, 98, KeyRevoked(key_id="admin-1", reason="lost").encode())
    desk.registry.apply(ADAPTERS.name, 99, AdapterRevoked(adapter=adapter, reason="x", revoked_by="tests").encode())
    again = await desk.answer(work)
    assert first is not None
    assert again is not None
    assert (again.audit, again.appends[0].value) == (first.audit, first.appends[0].value)


async def test_a_bad_grant_is_answered_once_and_for_good_and_leaves_the_refusal_in_the_audit() -> None:
    desk = Desk()
    effect = await desk.post(make_job(impersonation=make_grant("globex", START_MS)))
    reply = reply_of(effect)
    assert (reply.reason, reply.retryable, reply.message) == (
        RejectReason.IMPERSONATION, False, "the grant is for another tenant"
    )  # fmt: skip
    assert effect is not None
    assert not effect.appends
    ((key, rejected),) = effect.audit
    assert isinstance(rejected, Rejected)
    assert (key, rejected.reason) == ("tenant/acme", RejectReason.IMPERSONATION)
