"""A tenants' file: what it asks for, and what it may not say."""

import pytest

from producers.release.tenant_file import BadTenantFile, Change, changes_in
from schemas.errors import InvalidName
from schemas.jobs import JobClass
from schemas.tenants import AliasGranted, TenantConfigured

ACME = TenantConfigured(tenant="acme", concurrency_max=7, tokens_per_day=500, configured_by="root")
SUPPORT = AliasGranted(tenant="acme", alias="support", entitlement="contract 7", granted_by="root")


def changes(text: str) -> list[Change]:
    return changes_in(text, {"acme": ACME}, {("acme", "support"): SUPPORT}, "ann")


def test_what_a_file_leaves_out_stays_as_it_is() -> None:
    (change,) = changes("[acme]\nweight = 300\nslots_floor = 1\n")
    assert change.configured is not None
    assert change.configured == ACME.model_copy(update={"weight": 300, "slots_floor": 1, "configured_by": "ann"})
    assert (change.grants, change.withdrawn) == ((), ())


def test_a_new_tenant_has_the_defaults() -> None:
    (change,) = changes("[globex]\n")
    assert change.configured == TenantConfigured(tenant="globex", configured_by="ann")
    assert change.sentences == ["globex: limits change"]


def test_a_file_that_says_what_is_recorded_changes_nothing() -> None:
    text = '[acme]\nconcurrency_max = 7\n[acme.grants.support]\nentitlement = "contract 7"\n'
    assert changes(text)[0].sentences == []


def test_grants_are_given_with_their_bounds_and_taken_back() -> None:
    (change,) = changes(
        """
        [acme.grants]
        support = false
        unheard-of = false
        [acme.grants.legal]
        entitlement = "contract 9"
        classes = ["batch"]
        tokens_max = 100
        not_before = 2026-12-01T00:00:00Z
        expires = 2027-01-01T00:00:00+01:00
        """
    )
    assert change.configured is None
    assert [gone.alias for gone in change.withdrawn] == ["support"]
    (legal,) = change.grants
    assert (legal.alias, legal.classes, legal.tokens_max) == ("legal", (JobClass.BATCH,), 100)
    assert (legal.not_before_ms, legal.expires_at_ms) == (1_796_083_200_000, 1_798_758_000_000)
    assert legal.granted_by == "ann"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no tenant"),
        ("[acme", "not TOML"),
        ("acme = 3", r"\[acme\] is not a table"),
        ("[acme]\nwieght = 3", "wieght"),
        ("[acme]\nweight = 0", "weight"),
        ("[acme]\nweight = '3'", "weight"),
        ("[acme]\nconfigured_by = 'me'", "configured_by"),
        ("[acme]\nclasses = ['fast']", "interactive, batch"),
        ("[acme]\ngrants = 3", "grants"),
        ("[acme.grants]\nsupport = 3", r"acme.grants.support"),
        ("[acme.grants.support]\n", "entitlement"),
        ("[acme.grants.support]\nentitlement = 'x'\nexpires = 3", "expires is a time"),
    ],
)
def test_what_a_file_may_not_say_is_named(text: str, named: str) -> None:
    with pytest.raises(BadTenantFile, match=named):
        changes(text)


@pytest.mark.parametrize("text", ['["not a tenant"]', '[acme.grants."../up"]\nentitlement = "x"'])
def test_a_name_has_its_grammar_here_too(text: str) -> None:
    with pytest.raises(InvalidName):
        changes(text)
