"""What a tenant may do with Kafka, tried with clients that are not ours: confluent-kafka and Kafka's console tools."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from infra.kafka.clients import KafkaError as Refused
from infra.kafka.members import GroupMembers
from infra.launch.plan import REPOSITORY
from infra.launch.stack import Stack
from infra.provision import Provisioner
from infra.settings import KafkaSettings
from schemas.errors import InvalidName
from schemas.topics import INGRESS_BYTES_MAX, PER_TENANT, REQUESTS, Role, requests_group
from tests.members import in_the_group

WRITABLE = ("jobs", "batch", "cancel")
READABLE = ("stream", "replies")
WAIT_S = 15.0
QUIET = {"log_level": 0}


def write(user: KafkaSettings, topic: str, value: bytes = b"{}", **options: str | int) -> KafkaError | None:
    """Append one record and return Kafka's refusal."""
    refusals: list[KafkaError | None] = []
    producer = Producer({**user.librdkafka(), **QUIET, **options})
    producer.produce(topic, value, on_delivery=lambda error, _: refusals.append(error))
    assert producer.flush(WAIT_S) == 0
    return refusals[0]


def read(user: KafkaSettings, topic: str, group: str | None = None) -> bytes:
    """The first record of a topic. Raises KafkaException with Kafka's refusal."""
    consumer = Consumer(
        {**user.librdkafka(), **QUIET, "group.id": group or user.group("test"), "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(WAIT_S)
        assert message is not None
        if message.error() is not None:
            raise KafkaException(message.error())
        return bytes(message.value())
    finally:
        consumer.close()


def refusal(user: KafkaSettings, topic: str, group: str | None = None) -> str:
    with pytest.raises(KafkaException) as refused:
        read(user, topic, group)
    return str(refused.value.args[0].name())


def console(tool: str, user: KafkaSettings, arguments: list[str], folder: Path, given: str = "") -> str:
    """Run one of Kafka's own tools as a user and return all that it says."""
    properties = folder / f"{user.username}.properties"
    login = "org.apache.kafka.common.security.scram.ScramLoginModule"
    properties.write_text(
        f"security.protocol={user.protocol}\nsasl.mechanism={user.mechanism}\n"
        f'sasl.jaas.config={login} required username="{user.username}" password="{user.password}";\n'
    )
    java = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{REPOSITORY}/.cache/kafka/libs/*"]
    common = ["--bootstrap-server", user.bootstrap, "--command-config", str(properties)]
    done = subprocess.run(
        [*java, f"org.apache.kafka.tools.{tool}", *common, *arguments],
        input=given, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize("topic", WRITABLE)
def test_a_tenant_writes_its_own_ingress_topics(stack: Stack, tenant: Callable[[], str], topic: str) -> None:
    name = tenant()

    assert write(stack.kafka(name), f"{topic}.{name}") is None


@pytest.mark.parametrize("topic", READABLE)
def test_a_tenant_reads_its_own_results(stack: Stack, tenant: Callable[[], str], topic: str) -> None:
    name = tenant()
    assert write(stack.kafka(Role.WORKER), f"{topic}.{name}", b"result") is None

    assert read(stack.kafka(name), f"{topic}.{name}") == b"result"


def test_a_tenant_writes_nothing_else(stack: Stack, tenant: Callable[[], str]) -> None:
    name, other = tenant(), tenant()
    topics = [f"{topic}.{other}" for topic in WRITABLE]
    topics += [f"{topic}.{name}" for topic in READABLE]
    topics += ["audit", "metering", "adapters", "aliases", "keys", "dlq", "requests.main", "cancels.main"]

    refusals = {topic: write(stack.kafka(name), topic) for topic in topics}

    assert {topic: error and error.name() for topic, error in refusals.items()} == dict.fromkeys(
        topics, "TOPIC_AUTHORIZATION_FAILED"
    )


def test_a_tenant_reads_nothing_else(stack: Stack, tenant: Callable[[], str]) -> None:
    name, other = tenant(), tenant()
    topics = [f"{topic}.{other}" for topic in (*READABLE, *WRITABLE)]
    topics += [f"{topic}.{name}" for topic in WRITABLE]
    topics += ["audit", "metering", "adapters", "aliases", "keys", "dlq", "requests.main", "cancels.main"]

    assert {topic: refusal(stack.kafka(name), topic) for topic in topics} == dict.fromkeys(
        topics, "TOPIC_AUTHORIZATION_FAILED"
    )


def test_a_topic_of_another_tenant_and_one_that_is_not_there_are_refused_alike(
    stack: Stack, tenant: Callable[[], str]
) -> None:
    name, other = stack.kafka(tenant()), tenant()

    assert write(name, f"jobs.{other}") == write(name, "jobs.nobody")
    assert refusal(name, f"replies.{other}") == refusal(name, "replies.nobody")


def test_a_name_that_begins_like_another_tenants_opens_nothing(stack: Stack) -> None:
    stack.add_tenant("acme-evil")
    acme = stack.add_tenant("acme")

    refused = write(acme, "jobs.acme-evil")

    assert refused is not None
    assert refused.name() == "TOPIC_AUTHORIZATION_FAILED"
    assert refusal(acme, "replies.acme", group="acme-evil.group") == "GROUP_AUTHORIZATION_FAILED"


def test_a_tenant_starts_no_transaction(stack: Stack, tenant: Callable[[], str]) -> None:
    settings = stack.kafka(tenant())
    producer = Producer({**settings.librdkafka(), **QUIET, "transactional.id": "worker.requests.main.0"})

    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(WAIT_S)

    assert refused.value.args[0].name() == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"


@pytest.mark.parametrize("name", ["admin", "broker", "controller", "router", "worker"])
def test_no_tenant_is_named_like_a_part_of_the_platform(stack: Stack, name: str) -> None:
    with pytest.raises(InvalidName):
        stack.add_tenant(name)


def test_a_compressed_record_is_measured_by_what_it_unpacks_to(stack: Stack, tenant: Callable[[], str]) -> None:
    name = tenant()
    bomb = b"0" * (5 * INGRESS_BYTES_MAX)
    options: dict[str, str | int] = {"compression.type": "gzip", "message.max.bytes": 2 * len(bomb)}

    refused = write(stack.kafka(name), f"jobs.{name}", bomb, **options)

    assert refused is not None
    assert refused.name() == "MSG_SIZE_TOO_LARGE"
    assert write(stack.kafka(name), f"jobs.{name}", bomb[: 1 << 20], **options) is None


def test_kafkas_own_console_tools_meet_the_same_rights(stack: Stack, tenant: Callable[[], str], tmp_path: Path) -> None:
    name, other = tenant(), tenant()
    user = stack.kafka(name)
    assert write(stack.kafka(Role.WORKER), f"replies.{name}", b"a reply") is None

    written = console("ConsoleProducer", user, ["--topic", f"jobs.{name}"], tmp_path, "{}\n")
    refused = console("ConsoleProducer", user, ["--topic", f"jobs.{other}"], tmp_path, "{}\n")
    reading = ["--group", user.group("console"), "--from-beginning", "--max-messages", "1", "--timeout-ms", "15000"]
    shown = console("consumer.ConsoleConsumer", user, ["--topic", f"replies.{name}", *reading], tmp_path)
    hidden = console("consumer.ConsoleConsumer", user, ["--topic", f"replies.{other}", *reading], tmp_path)

    assert "rror" not in written
    assert "TopicAuthorizationException" in refused
    assert "a reply" in shown
    assert "TopicAuthorizationException" in hidden


def test_provisioning_again_changes_nothing_a_tenant_notices(stack: Stack, tenant: Callable[[], str]) -> None:
    name = tenant()
    before = stack.kafka(name)

    Provisioner(stack.kafka("admin")).add_services(stack.file.kafka_users)
    after = stack.add_tenant(name)

    assert before == after
    assert write(before, PER_TENANT[0].of(name)) is None


@pytest.mark.parametrize("role", [Role.ROUTER, Role.OPERATOR])
async def test_who_may_ask_who_works_for_a_pool_may_do_nothing_more_to_its_group(stack: Stack, role: Role) -> None:
    user, pool = stack.kafka(role), f"asked-by-{role}"
    await asyncio.to_thread(Provisioner(stack.kafka("admin")).add_pool, pool)
    async with in_the_group(stack, pool, "worker-1"):
        assert await members(user, requests_group(pool)) == {"worker-1"}
        # It reads these topics as itself, and none of them as a member of that group.
        assert await asyncio.to_thread(refusal, user, "workers", requests_group(pool)) == "GROUP_AUTHORIZATION_FAILED"
        assert await asyncio.to_thread(refusal, user, REQUESTS.of(pool)) == "TOPIC_AUTHORIZATION_FAILED"
        assert await asyncio.to_thread(deletion_refusal, user, requests_group(pool)) == "GROUP_AUTHORIZATION_FAILED"
        for other in (f"{Role.WORKER}.other", f"{Role.SETTLER}.metering"):
            with pytest.raises(Refused, match="Error 30"):
                await members(user, other)
        assert await members(user, requests_group(pool)) == {"worker-1"}


async def members(user: KafkaSettings, group: str) -> frozenset[str]:
    groups = GroupMembers(user)
    await groups.start()
    try:
        return await groups.of(group)
    finally:
        await groups.stop()


def deletion_refusal(user: KafkaSettings, group: str) -> str:
    admin = AdminClient({**user.librdkafka(), **QUIET})
    (deleting,) = admin.delete_consumer_groups([group]).values()
    with pytest.raises(KafkaException) as refused:
        deleting.result(WAIT_S)
    return str(refused.value.args[0].name())
