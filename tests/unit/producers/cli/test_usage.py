"""`switchyard usage` before it reads anything."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.settings import NoStack
from producers.cli.usage import usage


@pytest.mark.parametrize("name", ["Acme", "a/b", "a.b", '"', ""])
def test_a_malformed_tenant_is_refused(name: str, tmp_path: Path) -> None:
    found = CliRunner(env={"SWITCHYARD_HOME": str(tmp_path)}).invoke(usage, ["--tenant", name])
    assert (found.exit_code, found.stdout) == (2, "")


def test_without_a_stack_it_says_so(tmp_path: Path) -> None:
    found = CliRunner(env={"SWITCHYARD_HOME": str(tmp_path)}).invoke(usage, ["--tenant", "acme"])
    assert isinstance(found.exception, NoStack)
    assert found.stdout == ""
