"""Signing keys from the command line, on a real Kafka: rotated, listed, revoked for ever."""

import pytest

from infra.keys import load_key
from infra.launch.stack import Stack
from schemas.keys import KeyRole
from tests.integration.test_release_cli import Shell

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]


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
