"""Rights follow from the catalogue, and a tenant's match no other tenant."""

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from infra.provision import RESERVED_NAMES, Grant, grants_of_role, grants_of_tenant, parse_new_tenant
from schemas.errors import InvalidName
from schemas.topics import EVERY_SERVICE, TOPICS, Role


def topics_of(grants: frozenset[Grant], operation: AclOperation) -> set[str]:
    return {grant.name for grant in grants if grant.resource == ResourceType.TOPIC and grant.operation == operation}


def test_a_tenant_writes_three_topics_and_reads_two() -> None:
    grants = grants_of_tenant("acme")

    assert topics_of(grants, AclOperation.WRITE) == {"jobs.acme", "batch.acme", "cancel.acme"}
    assert topics_of(grants, AclOperation.READ) == {"stream.acme", "replies.acme"}


def test_a_tenants_only_prefix_ends_with_what_no_name_holds() -> None:
    prefixes = {grant.name for grant in grants_of_tenant("acme") if grant.prefixed}

    assert prefixes == {"acme."}


@pytest.mark.parametrize("role", sorted(EVERY_SERVICE))
def test_a_service_has_exactly_the_topics_of_the_catalogue(role: Role) -> None:
    grants = grants_of_role(role)

    assert topics_of(grants, AclOperation.WRITE) == {t.prefix or t.name for t in TOPICS if role in t.writers}
    assert topics_of(grants, AclOperation.READ) == {t.prefix or t.name for t in TOPICS if role in t.readers}


def test_only_router_and_worker_start_transactions_each_under_its_own_name() -> None:
    names = {
        role.value: {g.name for g in grants_of_role(role) if g.resource == ResourceType.TRANSACTIONAL_ID}
        for role in EVERY_SERVICE
    }

    assert {role: found for role, found in names.items() if found} == {"router": {"router."}, "worker": {"worker."}}


def test_only_router_and_operator_ask_who_is_in_the_group_of_a_pool() -> None:
    asked = {
        role.value: {g.name for g in grants_of_role(role) if g.operation == AclOperation.DESCRIBE and g.prefixed}
        - {f"{role}."}
        for role in EVERY_SERVICE
    }

    assert {role: found for role, found in asked.items() if found} == {
        "router": {"worker.requests."},
        "operator": {"worker.requests."},
    }


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_a_tenant_cannot_be_named_like_a_user_of_the_platform(name: str) -> None:
    with pytest.raises(InvalidName, match="part of Switchyard"):
        parse_new_tenant(name)
