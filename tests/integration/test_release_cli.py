"""Release from the command line alone, on a real Kafka, with a gate process that runs the fake engine."""

import json
import re
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from infra.launch.stack import Stack
from infra.launch.start import Process
from infra.settings import EngineSettings
from producers.cli.main import main
from schemas.topics import Role
from tests.release_files import good_adapter, small_base

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

GATE_S = 60.0
_names = count(1)


@pytest.fixture
def gate(stack: Stack) -> Iterator[Process]:
    """A gate process. It reports on everything that other tests left behind, too."""
    process = stack.start_engine(f"gate-{next(_names)}", Role.GATE, EngineSettings(kind="fake", step_ms=1))
    yield process
    process.signal(signal.SIGTERM)
    assert process.wait_exit(20.0) == 0


class Shell:
    """The command line on the shared stack."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(main, ["--home", str(self._home), *map(str, arguments)])

    def said(self, *arguments: object) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    def refused(self, *arguments: object) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        return result.output


@pytest.fixture
def shell(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("SWITCHYARD_HOME", str(stack.file.home))
    return Shell(stack.file.home)


def test_a_release_engineer_needs_the_command_line_only(shell: Shell, gate: Process, tmp_path: Path) -> None:
    del gate
    name = f"shell-{next(_names)}"
    base = shell.said("base", "add", small_base(tmp_path / "base"), "--name", name, "--rank-max", 2)
    shell.said("pool", "set", name, "--base", name, "--rank-max", 4, "--context-max", 128, "--partitions", 1)
    shell.said("tenant", "add", name, "--concurrency-max", 3)
    shell.said("base", "grant", name, "--tenant", name)
    digest = shell.said(
        "adapter", "submit", good_adapter(tmp_path / "adapter"), "--tenant", name, "--alias", "support", "--base", base
    )
    assert shell.said("adapter", "approve", digest, "--wait", GATE_S) == f"approved {digest}"
    (listed,) = shell.said("adapter", "list", "--tenant", name, "--json").splitlines()
    assert {"digest": digest, "state": "approved", "aliases": "support"}.items() <= json.loads(listed).items()
    shown = json.loads(shell.said("adapter", "show", "support", "--tenant", name))
    assert shown["gated"]["report"]["differing"] == shown["gated"]["report"]["prompts"] == 4
    assert shell.said("adapter", "revoke", digest, "--reason", "tests", "--wait", 0) == f"revoked {digest}"
    assert digest in shell.said("adapter", "list")
    assert name in shell.said("tenant", "list")
    assert base in shell.said("base", "list")
    assert base in shell.said("pool", "list")


def test_the_command_line_refuses_in_one_sentence(shell: Shell, tmp_path: Path) -> None:
    name = f"shell-{next(_names)}"
    unknown = "sha256:" + "0" * 64
    assert "there is no tenant" in shell.refused("tenant", "remove", name)
    assert "a digest is 'sha256:'" in shell.refused("adapter", "approve", unknown[:20])
    assert "the registry has no adapter" in shell.refused("adapter", "revoke", unknown, "--reason", "tests")
    assert "say whose it is with --tenant" in shell.refused("adapter", "show", "support")
    assert "has no alias" in shell.refused("adapter", "show", "support", "--tenant", name)
    assert "is the name of a part of Switchyard" in shell.refused("tenant", "add", "router")
    assert "cannot be read" in shell.refused("base", "add", tmp_path, "--name", name)
    assert re.search(r"^gate-\d+: there already$", shell.said("key", "init"), re.MULTILINE)
