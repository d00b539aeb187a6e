"""`switchyard pool list` on a real Kafka: which workers count, as the coordinator says who is in their group."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from infra.launch.stack import Stack
from infra.provision import Provisioner
from schemas.topics import Role, requests_group
from tests.integration.test_release_cli import Shell
from tests.members import in_the_group
from tests.release_house import House, announce, house_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 20.0
_names = count(1)


@pytest.fixture
async def house(stack: Stack, tmp_path: Path) -> AsyncIterator[House]:
    async with house_on(stack, tmp_path) as house:
        yield house


@pytest.fixture
def without_the_right(stack: Stack) -> Iterator[None]:
    """The operator of a stack that was made before it might ask who is in a group."""
    admin = AdminClient({**stack.kafka("admin").librdkafka(), "log_level": 0})
    right = AclBindingFilter(
        ResourceType.GROUP, requests_group(""), ResourcePatternType.PREFIXED, f"User:{Role.OPERATOR}", None,
        AclOperation.DESCRIBE, AclPermissionType.ALLOW,
    )  # fmt: skip
    (taken,) = admin.delete_acls([right]).values()
    assert len(list(taken.result(WAIT_S))) == 1
    yield
    Provisioner(stack.kafka("admin")).add_services(stack.file.kafka_users)


async def listed(house: House) -> tuple[list[str], dict[str, str], str]:
    """Rows and window of the house's pool, the state of each worker, and what is said beside the tables."""
    shell = Shell(house.stack.file.home)
    result = await asyncio.to_thread(shell.run, "pool", "list")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    (pool,) = [words for words in lines if words[:2] == [house.tenant, house.base.base]]
    states = {words[0]: " ".join(words[6:]) for words in lines if words[1:2] == [house.tenant]}
    return pool[5:7], states, result.stderr


async def test_a_worker_that_only_announced_itself_is_not_in_the_group_and_counts_for_nothing(house: House) -> None:
    here, away = (f"worker-{next(_names)}-of-{house.tenant}" for _ in range(2))
    async with in_the_group(house.stack, house.tenant, here):
        await announce(house, away, (0,))
        assert await listed(house) == (["0", "0"], {away: "not in the group"}, "")
        await announce(house, here, (0,))
        assert await listed(house) == (["4", "8"], {here: "ready", away: "not in the group"}, "")
    # It left in order, and took nothing back: what it announced still stands.
    assert await listed(house) == (["0", "0"], {here: "not in the group", away: "not in the group"}, "")


async def test_a_question_that_kafka_refuses_leaves_a_list_that_says_so(house: House, without_the_right: None) -> None:
    del without_the_right
    name = f"worker-{next(_names)}-of-{house.tenant}"
    await announce(house, name, (0,))
    async with in_the_group(house.stack, house.tenant, name):
        async with asyncio.timeout(WAIT_S):
            # A broker obeys a change of rights within moments.
            while (found := await listed(house))[0] != ["unknown", "unknown"]:
                pass
    assert found[1] == {name: "membership unknown"}
    assert f"who is in the group of pool {house.tenant} is unknown: [Error 30]" in found[2]
