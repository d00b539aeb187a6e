"""A tenant's Kafka user over its life, on a real Kafka: made with its limits, its password rotated, taken away."""

from itertools import count
from time import monotonic

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer

from infra.client_quotas import client_quota
from infra.launch.stack import Stack
from infra.provision import Provisioner
from infra.settings import KafkaSettings, StackFile
from schemas.topics import Role
from tests.integration.test_acls import QUIET, write
from tests.integration.test_release_cli import Shell

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 15.0
_names = count(1)


@pytest.fixture
def name() -> str:
    return f"user-{next(_names)}"


def credentials(stack: Stack, name: str) -> KafkaSettings:
    """As they are kept now."""
    return StackFile.load(stack.file.home).kafka(name)


def login_refusal(user: KafkaSettings) -> str | None:
    """What a new connection as this user meets; None when Kafka lets it in."""
    errors: list[KafkaError] = []
    producer = Producer({**user.librdkafka(), **QUIET, "error_cb": errors.append})
    delivered: list[KafkaError | None] = []
    producer.produce(f"jobs.{user.username}", b"{}", on_delivery=lambda error, _: delivered.append(error))
    deadline = monotonic() + WAIT_S
    while monotonic() < deadline and not delivered:
        producer.poll(0.1)
        refused = [error for error in errors if error.code() == KafkaError._AUTHENTICATION]
        if refused:
            producer.purge()
            return str(refused[0].name())
    assert delivered == [None]
    return None


def next_message(consumer: Consumer) -> Message:
    message = consumer.poll(WAIT_S)
    assert message is not None
    return message


def test_a_removed_tenant_neither_produces_nor_consumes_also_on_connections_it_had(stack: Stack, name: str) -> None:
    shell = Shell(stack.file.home)
    shell.said("tenant", "add", name)
    user = credentials(stack, name)
    refusals: list[KafkaError | None] = []
    producer = Producer({**user.librdkafka(), **QUIET})
    producer.produce(f"jobs.{name}", b"{}", on_delivery=lambda error, _: refusals.append(error))
    assert producer.flush(WAIT_S) == 0
    consumer = Consumer({**user.librdkafka(), **QUIET, "group.id": user.group("test"), "auto.offset.reset": "earliest"})
    consumer.subscribe([f"replies.{name}"])
    assert write(stack.kafka(Role.WORKER), f"replies.{name}", b"before") is None
    assert next_message(consumer).value() == b"before"

    assert shell.said("tenant", "remove", name) == f"removed {name}"
    assert write(stack.kafka(Role.WORKER), f"replies.{name}", b"after") is None
    producer.produce(f"jobs.{name}", b"{}", on_delivery=lambda error, _: refusals.append(error))
    assert producer.flush(WAIT_S) == 0
    # A fetch that the broker held when the rights went is still answered; the one after it is refused.
    while (error := next_message(consumer).error()) is None:
        pass
    consumer.close()

    assert [refusal and refusal.name() for refusal in refusals] == [None, "TOPIC_AUTHORIZATION_FAILED"]
    assert error.name() in {"TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"}
    assert login_refusal(user) == "_AUTHENTICATION"
    assert name not in StackFile.load(stack.file.home).kafka_users


def test_a_tenant_that_was_removed_by_halves_is_removed_by_a_second_run_and_added_with_a_new_password(
    stack: Stack, name: str
) -> None:
    shell = Shell(stack.file.home)
    shell.said("tenant", "add", name)
    first = credentials(stack, name)
    shell.said("tenant", "remove", name)
    # As if that run had died after its record: the user is there, with its rights and its kept password.
    Provisioner(stack.kafka("admin")).add_tenant(name, first.password)
    StackFile.change(stack.file.home, lambda file: file.with_user(name, first.password))
    assert login_refusal(first) is None

    assert shell.said("tenant", "remove", name) == f"removed {name}"
    assert login_refusal(first) == "_AUTHENTICATION"
    assert shell.said("tenant", "remove", name) == f"removed {name}"

    shell.said("tenant", "add", name)
    assert credentials(stack, name).password != first.password
    assert login_refusal(credentials(stack, name)) is None
    assert login_refusal(first) == "_AUTHENTICATION"


def test_a_rotated_password_opens_connections_and_the_old_one_opens_none(stack: Stack, name: str) -> None:
    shell = Shell(stack.file.home)
    shell.said("tenant", "add", name)
    old = credentials(stack, name)

    said = shell.said("tenant", "rotate", name, "--show-password")

    new = credentials(stack, name)
    assert said == f"rotated the password of {name}\n{new.password}"
    assert login_refusal(old) == "_AUTHENTICATION"
    assert login_refusal(new) is None
    shell.said("tenant", "remove", name)
    assert f"there is no tenant '{name}'" in shell.refused("tenant", "rotate", name)


def test_a_tenant_that_is_added_has_the_quotas_of_its_record(stack: Stack, name: str) -> None:
    Shell(stack.file.home).said("tenant", "add", name)

    quota = client_quota(stack.kafka("admin"), name)

    assert "producer_byte_rate=" in quota
    assert "consumer_byte_rate=" in quota


def test_removing_one_tenant_leaves_the_rights_of_one_whose_name_begins_alike(stack: Stack, name: str) -> None:
    longer = f"{name}-b"
    stack.add_tenant(name)
    kept = stack.add_tenant(longer)

    Provisioner(stack.kafka("admin")).remove_tenant(name)

    assert write(kept, f"jobs.{longer}") is None
