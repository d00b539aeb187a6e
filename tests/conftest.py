"""Fixtures that every test may use.

- `stack`: a real Kafka and Redis, provisioned, one for the whole run. `stack.kafka("router")`, `stack.kafka(tenant)`,
  `stack.redis("worker")`, `stack.objects_dir`, `stack.add_tenant(name)`, `stack.start_engine("worker-1", engine=…)`.
  A test that uses it is marked `kafka` by itself. Tests share it, so each takes tenants of its own from `tenant`.
- `tenant`: `tenant()` makes a tenant that no other test has (topics, user, rights) and returns its name.
- `redis_server`: a real Redis for this test alone, which it may empty or stop; `redis_server.redis("router")`.
  A test that uses it is marked `redis` by itself.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from infra.launch.plan import StackOptions
from infra.launch.processes import free_port
from infra.launch.redis_native import redis_spec, redis_users
from infra.launch.stack import Stack, running_stack
from infra.launch.start import Launcher, Process
from infra.settings import RedisSettings
from tests.factories import IN_WORDS

MARKED_BY_FIXTURE = {"stack": "kafka", "redis_server": "redis"}

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("switchyard", deadline=None)
settings.load_profile("switchyard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses a service is marked for it, so that none slips into the fast tests."""
    for item in items:
        for fixture, marker in MARKED_BY_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(home=tmp_path_factory.mktemp("stack"), orderly=False, prompts=IN_WORDS)
    with running_stack(options) as running:
        yield running


@pytest.fixture(scope="session")
def _tenant_numbers() -> Iterator[int]:
    return count(1)


@pytest.fixture
def tenant(stack: Stack, _tenant_numbers: Iterator[int]) -> Callable[[], str]:
    def make() -> str:
        name = f"tenant-{next(_tenant_numbers)}"
        stack.add_tenant(name)
        return name

    return make


class RedisServer:
    """A Redis of one test's own."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self._port = free_port()
        self._passwords = {role: f"secret-of-{role}" for role in redis_users()}
        self._spec = redis_spec(folder, self._port, self._passwords)
        self.process = self.start()

    def start(self) -> Process:
        """Start it (again, after its process was killed): the data is kept."""
        self.process = self._launcher.start(self._spec)
        self.process.wait_ready()
        return self.process

    def redis(self, role: str) -> RedisSettings:
        return RedisSettings(url=f"redis://127.0.0.1:{self._port}/0", username=role, password=self._passwords[role])


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with Launcher(tmp_path, orderly=False) as launcher:
        yield RedisServer(launcher, tmp_path)
