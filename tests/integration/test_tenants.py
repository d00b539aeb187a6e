"""Tenants from the command line, on a real Kafka: a file that says what each may use, grants, and what Kafka limits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.client_quotas import client_quota
from infra.launch.stack import Stack
from tests.integration.test_release_cli import Shell

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]

FILE = """
[{name}]
weight = 250
tokens_per_day = 12345
produce_bytes_per_s = 2000000
[{name}.grants.support-en]
entitlement = "contract 7"
tokens_max = 64
"""


def test_a_file_makes_a_tenant_once_and_says_what_it_did(
    stack: Stack, tmp_path: Path, tenant: Callable[[], str]
) -> None:
    shell, name, file = Shell(stack.file.home), tenant(), tmp_path / "tenants.toml"
    file.write_text(FILE.format(name=name))
    expected = f"{name}: limits change\n{name}: support-en is granted (contract 7)"
    assert shell.said("tenant", "set", file, "--dry-run") == expected
    assert name not in shell.said("tenant", "list")
    assert shell.said("tenant", "set", file) == expected
    assert shell.said("tenant", "set", file) == "nothing changes"
    shown = shell.said("tenant", "show", name)
    assert "12345" in shown
    assert "contract 7" in shown
    assert "producer_byte_rate=2000000" in client_quota(stack.kafka("admin"), name)
    file.write_text(f"[{name}]\nwieght = 3\n")
    assert "wieght" in shell.refused("tenant", "set", file)


def test_a_grant_is_given_replaced_and_withdrawn(stack: Stack, tenant: Callable[[], str]) -> None:
    shell, name = Shell(stack.file.home), tenant()
    shell.said("tenant", "add", name)
    shell.said("tenant", "grant", name, "legal", "--entitlement", "trial", "--class", "batch", "--until", "2030-01-01")
    assert "trial" in shell.said("tenant", "show", name)
    assert "2030-01-01T00:00:00+00:00" in shell.said("tenant", "show", name)
    shell.said("tenant", "withdraw", name, "legal", "--reason", "it ended")
    assert "trial" not in shell.said("tenant", "show", name)
    assert "nobody-here" in shell.refused("tenant", "show", "nobody-here")
