"""The command line finds every room's commands and loads none of them to say so."""

import logging
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from producers.cli.main import main

ENTRIES = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]["switchyard.commands"]
SLOW_MODULES = ("aiokafka", "pydantic", "redis", "torch", "confluent_kafka", "rich")


def test_help_lists_every_command_without_importing_a_client() -> None:
    probe = (
        "import sys\n"
        "from producers.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        f"print([name for name in {SLOW_MODULES!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(ENTRIES) <= listed
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["job", "batch", "audit"])
def test_every_command_explains_itself(name: str) -> None:
    found = CliRunner().invoke(main, [name, "--help"])
    assert found.exit_code == 0
    command = EntryPoint(name=name, value=ENTRIES[name], group="").load()
    assert isinstance(command, click.Group)
    for inner in command.commands:
        assert CliRunner().invoke(main, [name, inner, "--help"]).exit_code == 0


def test_what_goes_wrong_on_purpose_is_one_sentence(tmp_path: Path) -> None:
    arguments = ["job", "run", "--tenant", "acme", "--alias", "a", "hi"]
    found = CliRunner(env={"SWITCHYARD_HOME": str(tmp_path)}).invoke(main, arguments)
    assert (found.exit_code, found.stderr.count("\n")) == (1, 1)
    assert found.stderr.startswith(f"Error: no stack runs in {tmp_path}. Start one with: switchyard up.")


def test_a_malformed_tenant_is_refused_before_anything_is_looked_up() -> None:
    for tenant in ("Acme", "a/b", "../x", "a.b", ""):
        found = CliRunner().invoke(main, ["job", "cancel", "--tenant", tenant, "j"])
        assert found.exit_code == 2


def test_a_command_leaves_the_loggers_of_its_process_as_they_were() -> None:
    before = logging.getLogger("aiokafka").level
    CliRunner().invoke(main, ["job", "--help"])
    assert logging.getLogger("aiokafka").level == before
