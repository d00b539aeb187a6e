"""A whole stack: Kafka and Redis, provisioned, and Switchyard's processes on them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from confluent_kafka import Producer

from infra.clock import SystemClock
from infra.files import exclusively, write_private
from infra.kafka.records import Stamp
from infra.keys import keep_key, make_key
from infra.launch.containers import container_specs
from infra.launch.kafka_native import kafka_spec
from infra.launch.plan import REPOSITORY, Plan, ProcessSpec, StackOptions
from infra.launch.processes import engine_spec, free_port, platform_plan, process_spec
from infra.launch.redis_native import redis_spec, redis_users
from infra.launch.start import Launcher, Process, StartFailed
from infra.provision import LIBRDKAFKA_LOG_LEVEL, Provisioner, add_tenant_to, new_password
from infra.settings import (
    EngineSettings,
    KafkaSettings,
    LaunchSettings,
    ObjectSettings,
    RedisSettings,
    StackFile,
    read,
)
from schemas.errors import SwitchyardError
from schemas.keys import KeyRole
from schemas.topics import EVERY_SERVICE, KEYS, Role

SEND_SECONDS_MAX: Final = 20.0
# A fold of 10^5 events takes seconds; the record of a long life takes longer.
REBUILD_SECONDS_MAX: Final = 600.0


class KeyNotPublished(SwitchyardError):
    """A public key could not be appended to the log."""


class Stack:
    """A running stack. `file` describes it to clients; processes can be added, killed and replaced."""

    def __init__(self, file: StackFile, launcher: Launcher, options: StackOptions) -> None:
        self._file = file
        self._launcher = launcher
        self._options = options

    @property
    def file(self) -> StackFile:
        """As it is now: tenants added by other programs are in the file on disk, processes are known here."""
        return self._with_processes(StackFile.load(self._file.home))

    @property
    def objects_dir(self) -> Path:
        """The folder of the stack's object store."""
        return self._file.home / "objects"

    def kafka(self, user: str) -> KafkaSettings:
        """How a role, a tenant or `admin` reaches Kafka."""
        return self.file.kafka(user)

    def redis(self, role: str) -> RedisSettings:
        """How a role or `admin` reaches Redis."""
        return self.file.redis(role)

    def add_tenant(self, tenant: str) -> KafkaSettings:
        """Make a tenant's topics, user and rights. May be repeated."""
        return add_tenant_to(self.file, tenant).kafka(tenant)

    @property
    def processes(self) -> dict[str, Process]:
        return self._launcher.processes

    def start(self, name: str, role: Role, env: dict[str, str] | None = None) -> Process:
        """Start one more process of Switchyard, a router or a settler, and wait until it is ready."""
        extra = {**self._options.prompts.environment(), **(env or {})}
        process = self._launcher.start(process_spec(self._file, name, role, extra))
        process.wait_ready()
        self._save()
        return process

    def start_engine(
        self,
        name: str,
        role: Role = Role.WORKER,
        engine: EngineSettings | None = None,
        pool: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start one more worker or gate and wait until it is ready."""
        chosen = engine or self._options.engine
        spec = engine_spec(self._file, name, role, chosen, pool or self._options.pools[0])
        process = self._launcher.start(replace(spec, env={**spec.env, **(env or {})}))
        process.wait_ready()
        self._save()
        return process

    def ended(self) -> dict[str, int]:
        """Processes that ended by themselves, with their exit codes."""
        codes = {name: process.exit_code() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def restart(self, name: str) -> Process:
        """Start an ended process again as it was, without waiting for it."""
        process = self._launcher.start(self.processes[name].spec)
        self._save()
        return process

    def start_plan(self, plan: Plan, say: Callable[[str], None]) -> None:
        for stage in plan:
            self._launcher.start_stage(stage, say)
        self._save()

    def _save(self) -> None:
        StackFile.change(self._file.home, self._with_processes)

    def _with_processes(self, file: StackFile) -> StackFile:
        running = {name: process.running for name, process in self._launcher.processes.items()}
        return file.model_copy(update={"processes": running, "supervisor": self._file.supervisor})


@contextmanager
def running_stack(
    options: StackOptions, say: Callable[[str], None] = lambda _: None, supervisor: int | None = None
) -> Iterator[Stack]:
    """Start a stack, and leave no process of it behind. Raises StartFailed, ProvisioningFailed.

    The data in `options.home` stays, and a later stack there goes on with it. Use it from a thread that outlives the
    stack: its processes die with that thread.
    """
    options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _sole_owner(options.home):
        try:
            with Launcher(options.home, orderly=options.orderly) as launcher:
                yield _start(launcher, options, say, supervisor)
        finally:
            _forget_processes(options.home)


def _start(launcher: Launcher, options: StackOptions, say: Callable[[str], None], supervisor: int | None) -> Stack:
    file = _stack_file(options.home, supervisor)
    launcher.start_stage(_backing(file, containers=options.containers), say)
    _provision(file, options)
    say("topics, users and rights are in place")
    file.save()
    if options.router or options.workers:
        _open_ledger(file)
        say("the ledger is rebuilt from the log and open")
    stack = Stack(file, launcher, options)
    stack.start_plan(platform_plan(file, options), say)
    return stack


@contextmanager
def _sole_owner(home: Path) -> Iterator[None]:
    """Raises StartFailed when another launcher owns this home."""
    with ExitStack() as held:
        try:
            held.enter_context(exclusively(home / "lock", wait=False))
        except BlockingIOError as error:
            raise StartFailed(f"a stack already runs in {home}") from error
        yield


def _stack_file(home: Path, supervisor: int | None) -> StackFile:
    """The description of the stack to start; ports and passwords are those of the last time, where there was one."""
    kafka_port, _, redis_port = _ports(home)
    former = StackFile.load(home) if (home / "stack.json").exists() else None
    services = ("admin", "broker", "controller", *sorted(EVERY_SERVICE))
    objects = home / "objects"
    objects.mkdir(exist_ok=True, mode=0o700)
    return StackFile(
        home=home,
        bootstrap=f"127.0.0.1:{kafka_port}",
        redis_url=f"redis://127.0.0.1:{redis_port}/0",
        objects=ObjectSettings(directory=objects),
        kafka_users={user: new_password() for user in services} | (former.kafka_users if former else {}),
        redis_users={user: new_password() for user in redis_users()} | (former.redis_users if former else {}),
        supervisor=supervisor,
    )


def _ports(home: Path) -> tuple[int, int, int]:
    """Kafka's two ports and Redis's: chosen once per home, because Kafka's log remembers its controller's."""
    path = home / "ports.json"
    if not path.exists():
        write_private(path, json.dumps([free_port() for _ in range(3)]).encode())
    kafka, controller, redis = json.loads(path.read_bytes())
    return kafka, controller, redis


def _backing(file: StackFile, *, containers: bool) -> tuple[ProcessSpec, ...]:
    ports = _ports(file.home)
    kafka_port, controller_port, redis_port = ports
    folders = {name: file.home / name for name in ("kafka", "redis")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True, mode=0o700)
    if containers:
        return container_specs(file, ports)
    jars = read(LaunchSettings).jars or REPOSITORY / ".cache/kafka/libs"
    return (
        redis_spec(folders["redis"], redis_port, file.redis_users),
        kafka_spec(folders["kafka"], jars, (kafka_port, controller_port), file.kafka_users),
    )


def _provision(file: StackFile, options: StackOptions) -> None:
    provisioner = Provisioner(file.kafka("admin"))
    provisioner.add_services(file.kafka_users)
    for pool in options.pools:
        provisioner.add_pool(pool)
    for role in KeyRole:
        if not file.keys.newest(role):
            _publish_key(file, role)


def _open_ledger(file: StackFile) -> None:
    """Redis was started anew, so its ledger is closed until it was folded from the log again."""
    sections = (file.kafka("admin"), file.redis("admin"))
    env = {**os.environ, **{name: value for part in sections for name, value in part.environment().items()}}
    done = subprocess.run(
        [sys.executable, "-m", "ledger.rebuild"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=REBUILD_SECONDS_MAX,
        check=False,
    )
    if done.returncode != 0:
        raise StartFailed(f"the ledger was not rebuilt: {done.stderr.strip()[-500:]}")


def _publish_key(file: StackFile, role: KeyRole) -> None:
    key, published = make_key(role, 1)
    record = Stamp(source="launch").outgoing(KEYS.name, key.key_id, published, SystemClock().now_ms())
    producer = Producer({**file.kafka(Role.OPERATOR).librdkafka(), "log_level": LIBRDKAFKA_LOG_LEVEL})
    producer.produce(record.topic, record.value, record.key, headers=list(record.headers))
    if producer.flush(SEND_SECONDS_MAX):
        raise KeyNotPublished
    keep_key(file.keys, key)


def _forget_processes(home: Path) -> None:
    """What stays in the file of a stopped stack are its users, for the next start."""
    try:
        StackFile.change(home, lambda file: file.model_copy(update={"processes": {}, "supervisor": None}))
    except SwitchyardError:
        return
