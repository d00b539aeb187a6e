"""What can be said of the containers without an engine: the file and the plan fit each other."""

import re
from pathlib import Path

import pytest
import yaml

from infra.launch.containers import COMPOSE, container_specs
from infra.launch.plan import ProcessSpec
from infra.launch.redis_native import redis_users
from infra.settings import ObjectSettings, StackFile

PORTS = (20001, 20002, 20003)


@pytest.fixture
def specs(tmp_path: Path) -> tuple[ProcessSpec, ...]:
    for name in ("kafka", "redis"):
        (tmp_path / name).mkdir()
    users = ("admin", "broker", "controller")
    file = StackFile(
        home=tmp_path,
        bootstrap=f"127.0.0.1:{PORTS[0]}",
        redis_url=f"redis://127.0.0.1:{PORTS[2]}/0",
        objects=ObjectSettings(directory=tmp_path),
        kafka_users={user: f"secret-of-{user}" for user in users},
        redis_users={user: f"secret-of-{user}" for user in redis_users()},
    )
    return container_specs(file, PORTS)


def test_every_variable_of_the_compose_file_is_given(specs: tuple[ProcessSpec, ...]) -> None:
    wanted = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE.read_text()))

    assert all(wanted == set(spec.env) for spec in specs)


def test_each_process_runs_one_service_of_the_file(specs: tuple[ProcessSpec, ...]) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]

    assert {spec.argv[-1] for spec in specs} == set(services)
    assert all(service["network_mode"] == "host" for service in services.values())


def test_the_configuration_that_the_containers_read_is_written(specs: tuple[ProcessSpec, ...], tmp_path: Path) -> None:
    assert f"CLIENT://127.0.0.1:{PORTS[0]}" in (tmp_path / "kafka/server.properties").read_text()
    assert f"port {PORTS[2]}" in (tmp_path / "redis/redis.conf").read_text()
    assert not any("secret" in part for spec in specs for part in spec.argv)
