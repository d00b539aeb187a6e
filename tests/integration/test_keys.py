"""Signing keys from the command line, on a real Kafka: rotated, listed, revoked for ever."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from infra.keys import load_key
from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.settings import EngineSettings
from producers.release import platform, publish
from schemas.keys import KeyRole
from schemas.topics import ADAPTERS, Role
from tests.integration.test_release_cli import Shell
from tests.release_files import small_base
from tests.release_house import House, house_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 30.0
GATE = EngineSettings(kind="fake", step_ms=1)


@pytest.fixture
async def house(stack: Stack, tmp_path: Path) -> AsyncIterator[House]:
    async with house_on(stack, tmp_path) as house:
        yield house


def test_a_rotated_key_signs_and_the_former_is_believed_until_it_is_revoked(stack: Stack) -> None:
    shell, keys = Shell(stack.file.home), stack.file.keys
    former = load_key(keys, KeyRole.ADMIN).key_id

    said = shell.said("key", "rotate", "admin")

    new = load_key(keys, KeyRole.ADMIN).key_id
    assert new != former
    assert said == f"{new}: made and published"
    assert states(shell) >= {(former, "believed"), (new, "signs")}
    assert shell.said("key", "revoke", former, "--reason", "a test") == f"revoked {former}"
    assert shell.said("key", "revoke", former, "--reason", "again") == f"revoked {former}"
    assert states(shell) >= {(former, "revoked"), (new, "signs")}
    assert "admin-99" in shell.refused("key", "revoke", "admin-99", "--reason", "a test")


def states(shell: Shell) -> set[tuple[str, str]]:
    rows = [line.split() for line in shell.said("key", "list").splitlines()[1:]]
    return {(row[0], row[-1]) for row in rows}


async def test_a_gate_with_a_revoked_key_stands_still_and_the_next_one_tries_again_what_it_reported(
    house: House,
) -> None:
    # The key of every other test stays believed.
    leaked = await platform.rotate_key(house.desk, KeyRole.GATE)
    gate = await asyncio.to_thread(house.stack.start_engine, "gate-of-keys", Role.GATE, GATE)
    first = (await publish.submit(house.desk, house.submission(alias=None))).digest
    await reported(house, first, leaked)

    await platform.revoke_key(house.desk, leaked, "leaked")
    async with asyncio.timeout(WAIT_S):
        while (said := await asyncio.to_thread(readiness, gate)) == "ready":
            pass
    assert f"the signing key {leaked} is not published, or was revoked" in said
    assert "`switchyard key rotate gate`" in said
    second = (await publish.submit(house.desk, house.submission(0.5, alias=None))).digest
    with pytest.raises(publish.NotApproved, match="the gate's report is not believed"):
        await publish.approve(house.desk, first, wait_seconds=0.5)

    kept = await platform.rotate_key(house.desk, KeyRole.GATE)
    gate.signal(signal.SIGTERM)
    assert await asyncio.to_thread(gate.wait_exit, WAIT_S) == 0
    assert "trials.changed" in gate.log.read_text()
    gate = await asyncio.to_thread(house.stack.restart, gate.spec.name)
    for digest in (first, second):
        await reported(house, digest, kept)
        assert (await publish.approve(house.desk, digest)).adapter == digest
    assert await asyncio.to_thread(readiness, gate) == "ready"
    gate.signal(signal.SIGTERM)
    assert await asyncio.to_thread(gate.wait_exit, WAIT_S) == 0


async def test_what_a_revoked_registry_key_admitted_is_served_again_once_the_next_one_signs(house: House) -> None:
    leaked = await platform.rotate_key(house.desk, KeyRole.REGISTRY)
    digest = await house.approved()
    directory, name = small_base(house.folder / "second"), f"second-of-{house.tenant}"
    base = await platform.add_base(house.desk, directory, name, rank=2)
    kept = await platform.rotate_key(house.desk, KeyRole.REGISTRY)
    await platform.revoke_key(house.desk, leaked, "leaked")
    admitted = (digest, base.zero_adapter)
    assert {house.desk.registry.admission_problem(one) for one in admitted} == {"admission_signature"}

    assert (await publish.approve(house.desk, digest)).key_id == kept
    assert await platform.add_base(house.desk, directory, name, rank=2) == base
    assert {house.desk.registry.admission_problem(one) for one in admitted} == {None}
    before = house.desk.registry.positions[ADAPTERS.name]
    await publish.approve(house.desk, digest)
    await platform.add_base(house.desk, directory, name, rank=2)
    assert house.desk.registry.positions[ADAPTERS.name] == before


async def reported(house: House, digest: str, key_id: str) -> None:
    def by_that_key() -> bool:
        gated = house.desk.adapter(digest).gated
        return gated is not None and gated.key_id == key_id

    await house.desk.wait(by_that_key, WAIT_S)


def readiness(process: Process) -> str:
    """What it says of itself."""
    try:
        with urlopen(f"http://127.0.0.1:{process.running.metrics_port}/ready", timeout=5) as answer:
            return str(answer.read().decode().strip())
    except HTTPError as refused:
        return refused.read().decode().strip()
