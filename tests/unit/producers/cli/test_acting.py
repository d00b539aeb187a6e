"""As whom a command submits: no grant, no name of another tenant."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from producers.cli.main import main
from producers.cli.options import duration_ms
from producers.impersonation import BadGrant, load_grant
from schemas.digest import canonical
from tests.factories import make_grant

GRANT = make_grant("acme", 1_000)


def job(home: Path, *options: str, tenant: str | None = None) -> Result:
    """`switchyard job run` where no stack is: what is refused here was refused before anything was sent."""
    return _run(home, ["job", "run", *options, "--alias", "a", "hi"], tenant)


def batch(home: Path, *options: str, tenant: str | None = None) -> Result:
    """The same of `switchyard batch run`, with a file of no lines."""
    source = home / "in.jsonl"
    source.touch()
    files = [str(source), "--out", str(home / "out.jsonl"), "--errors", str(home / "err.jsonl")]
    found = _run(home, ["batch", "run", *options, *files], tenant)
    assert not list(home.glob("out.jsonl*"))
    return found


def _run(home: Path, arguments: list[str], tenant: str | None) -> Result:
    runner = CliRunner(env={"SWITCHYARD_HOME": str(home), "SWITCHYARD_TENANT": tenant})
    return runner.invoke(main, arguments)


Run = Callable[..., Result]
both = pytest.mark.parametrize("run", [job, batch])


@pytest.fixture
def grant(tmp_path: Path) -> str:
    path = tmp_path / "grant.json"
    path.write_bytes(canonical(GRANT.model_dump(mode="json")))
    return str(path)


@both
def test_without_a_grant_nobody_acts_for_another(tmp_path: Path, run: Run) -> None:
    found = run(tmp_path, "--as-tenant", "acme")
    assert found.exit_code == 2
    assert "--as-tenant needs a grant; make one with: switchyard tenant impersonate acme" in found.stderr


@both
def test_what_contradicts_itself_is_refused(tmp_path: Path, grant: str, run: Run) -> None:
    assert "not both" in run(tmp_path, "--tenant", "acme", "--as-tenant", "acme", "--grant", grant).stderr
    assert "--grant goes with --as-tenant" in run(tmp_path, "--tenant", "acme", "--grant", grant).stderr
    assert "Missing option '--tenant'" in run(tmp_path).stderr
    assert run(tmp_path, "--as-tenant", "../x", "--grant", grant).exit_code == 2


@both
def test_who_names_another_tenant_means_it_whatever_the_environment_says(tmp_path: Path, grant: str, run: Run) -> None:
    found = run(tmp_path, "--as-tenant", "acme", "--grant", grant, tenant="globex")
    assert (found.exit_code, "SWITCHYARD_KAFKA_USERNAME (here admin)" in found.stderr) == (1, True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"signature": "x", "signature": "y"}', b"[" * 5000])
@both
def test_a_file_that_holds_no_grant_is_refused_in_one_sentence(tmp_path: Path, content: bytes, run: Run) -> None:
    path = tmp_path / "grant.json"
    path.write_bytes(content)
    found = run(tmp_path, "--as-tenant", "acme", "--grant", str(path))
    assert (found.exit_code, found.stderr.count("\n")) == (1, 1)
    assert found.stderr.startswith(f"Error: {path} holds no grant: ")


def test_a_grant_is_read_as_it_was_written(tmp_path: Path, grant: str) -> None:
    assert load_grant(Path(grant)) == GRANT
    more = tmp_path / "more.json"
    more.write_text(json.dumps({**GRANT.model_dump(mode="json"), "admin": True}))
    with pytest.raises(BadGrant, match="admin"):
        load_grant(more)


@pytest.mark.parametrize(("text", "lasts_ms"), [("1s", 1_000), ("90s", 90_000), ("15m", 900_000), ("1h", 3_600_000)])
def test_a_duration_is_a_number_and_a_unit(text: str, lasts_ms: int) -> None:
    assert duration_ms(text, 3_600_000) == lasts_ms


@pytest.mark.parametrize(
    "text", ["", "15", "m", "0m", "-1m", "1.5h", "15 m", "1d", "61m", "2h", "3601s", "9" * 12 + "s"]
)
def test_anything_else_and_what_is_too_long_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        duration_ms(text, 3_600_000)
