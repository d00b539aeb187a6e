"""Settings are read once, whole and strictly; the stack's file is its owner's alone."""

from pathlib import Path

import pytest

from infra.settings import (
    BadSettings,
    EngineSettings,
    KafkaSettings,
    KeeperSettings,
    KeySettings,
    NoStack,
    ObjectSettings,
    ProcessSettings,
    RedisSettings,
    Settings,
    StackFile,
    home_directory,
    read,
)
from schemas.keys import KeyRole

KAFKA = KafkaSettings(bootstrap="127.0.0.1:9092", username="acme", password="hush")


def make_stack(home: Path) -> StackFile:
    return StackFile(
        home=home,
        bootstrap="127.0.0.1:9092",
        redis_url="redis://127.0.0.1:6379/0",
        objects=ObjectSettings(directory=home / "objects"),
        kafka_users={"admin": "hush"},
        redis_users={"router": "hush"},
    )


@pytest.mark.parametrize(
    "settings",
    [
        KAFKA,
        ObjectSettings(endpoint="127.0.0.1:7070", access_key="key", secret_key="hush", secure=False),
        ProcessSettings(name="worker-1", home=Path("/data"), metrics_port=9100),
        EngineSettings(kind="fake", slots=2),
    ],
)
def test_what_the_launcher_writes_to_the_environment_is_read_back(settings: Settings) -> None:
    assert read(type(settings), settings.environment()) == settings


def test_a_misspelt_variable_is_refused_by_its_name() -> None:
    with pytest.raises(BadSettings, match="SWITCHYARD_ENGINE_SLOTZ"):
        read(EngineSettings, {"SWITCHYARD_ENGINE_SLOTZ": "3"})


def test_a_missing_variable_is_named() -> None:
    environ = KAFKA.environment()
    del environ["SWITCHYARD_KAFKA_PASSWORD"]

    with pytest.raises(BadSettings, match="SWITCHYARD_KAFKA_PASSWORD"):
        read(KafkaSettings, environ)


def test_other_programs_variables_are_no_concern_of_ours() -> None:
    assert read(EngineSettings, {"PATH": "/bin", "SWITCHYARD_KAFKA_BOOTSTRAP": "x"}) == EngineSettings()


def test_a_password_is_not_in_a_repr_nor_in_an_error() -> None:
    environ = {**KAFKA.environment(), "SWITCHYARD_KAFKA_MECHANISM": "PLAIN"}

    with pytest.raises(BadSettings) as refused:
        read(KafkaSettings, environ)

    assert "hush" not in repr(KAFKA) + str(refused.value)


def test_a_group_begins_with_its_users_name_and_a_dot() -> None:
    assert KAFKA.group("reader") == "acme.reader"


def test_each_role_has_a_key_file_of_its_own() -> None:
    keys = KeySettings(directory=Path("/keys"))

    assert keys.path(KeyRole.ROUTE) == Path("/keys/route-1.pem")


def test_a_role_signs_with_its_newest_key_unless_a_number_is_given(tmp_path: Path) -> None:
    for name in ("route-2", "route-10", "route-x", "gate-11"):
        (tmp_path / f"{name}.pem").touch()

    assert KeySettings(directory=tmp_path).key_id(KeyRole.ROUTE) == "route-10"
    assert KeySettings(directory=tmp_path, number=2).key_id(KeyRole.ROUTE) == "route-2"


def test_the_stack_file_is_read_back_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)

    stack.save()

    assert StackFile.load(tmp_path) == stack
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    assert "hush" not in repr(stack)


def test_a_changed_stack_file_keeps_what_was_there(tmp_path: Path) -> None:
    make_stack(tmp_path).save()

    StackFile.change(tmp_path, lambda file: file.with_user("acme", "one"))
    StackFile.change(tmp_path, lambda file: file.with_user("globex", "two"))

    assert StackFile.load(tmp_path).kafka("acme").password == "one"
    assert StackFile.load(tmp_path).kafka("globex").password == "two"


REDIS_URLS = (
    "redis://localhost", "redis://127.0.0.1:6379/0", "rediss://redis.example:6380/1", "redis://[::1]:6379/0",
    "unix:///run/redis.sock", "redis+cluster://a:7000", "rediss+cluster://a:7000,b:7001/",
)  # fmt: skip
NO_REDIS_URLS = (
    "nonsense", "redis://", "redis://host:abc/0", "redis://host:1/x", "redis+cluster://", "redis+cluster://host",
    "rediss+cluster://a:1,b", "http://host:1/", "redis://user:geheim@:port/0",
)  # fmt: skip


@pytest.mark.parametrize("section", ["REDIS", "KEEPER"])
@pytest.mark.parametrize("url", NO_REDIS_URLS)
def test_what_is_no_redis_url_is_refused_by_its_variable_and_not_repeated(section: str, url: str) -> None:
    kind: type[RedisSettings | KeeperSettings] = RedisSettings if section == "REDIS" else KeeperSettings
    given = {
        f"SWITCHYARD_{section}_{name}": value for name, value in (("URL", url), ("USERNAME", "a"), ("PASSWORD", "b"))
    }
    with pytest.raises(BadSettings, match=f"^SWITCHYARD_{section}_URL: .*redis://host:6379/0") as refused:
        read(kind, given)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("url", REDIS_URLS)
def test_a_redis_url_is_taken_as_it_is(url: str) -> None:
    assert RedisSettings(url=url, username="a", password="b").url == url


def test_no_stack_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NoStack, match="switchyard up"):
        StackFile.load(tmp_path)


def test_a_user_that_the_stack_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="nobody"):
        make_stack(tmp_path).kafka("nobody")


def test_home_is_where_the_environment_says(tmp_path: Path) -> None:
    assert home_directory({"SWITCHYARD_HOME": str(tmp_path)}) == tmp_path
    assert home_directory({}) == Path.cwd() / ".switchyard"
