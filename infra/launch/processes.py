"""What Switchyard's own processes are started with: each gets its role's credentials and nothing of another's."""

import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from infra.launch.plan import REPOSITORY, Plan, ProcessSpec, SaysReady, StackOptions
from infra.settings import EngineSettings, KeeperSettings, PoolSettings, ProcessSettings, Settings, StackFile
from schemas.topics import Role

# Below the range from which a kernel takes ports for outgoing connections.
PORTS: Final = range(20_000, 30_000)
PORT_TRIES_MAX: Final = 200
# An engine reads a model, compiles and warms up.
ENGINE_READY_SECONDS_MAX: Final = 300.0
# A worker lets running jobs end for 20 s, hands over what is left, and stops its engine.
ENGINE_STOP_SECONDS_MAX: Final = 45.0
# What an engine must not do on its own: call home, or look for models elsewhere.
ENGINE_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def free_port() -> int:
    """A port on which nothing listens now."""
    for _ in range(PORT_TRIES_MAX):
        port = secrets.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port was found")


def platform_plan(stack: StackFile, options: StackOptions) -> Plan:
    """Router, settler, gate and workers, as far as the options ask for them."""
    control = [name for name, wanted in (("router", options.router), ("settler", options.settler)) if wanted]
    engines = [("gate", "gate")] if options.gate else []
    engines += [(f"worker-{number}", "worker") for number in range(1, options.workers + 1)]
    return (
        tuple(process_spec(stack, name, name, options.prompts.environment()) for name in control),
        tuple(
            replace(engine_spec(stack, name, role, options.engine, options.pools[0]), awaited=options.engines_awaited)
            for name, role in engines
        ),
    )


def process_spec(stack: StackFile, name: str, role: str, extra: Mapping[str, str] | None = None) -> ProcessSpec:
    """One of Switchyard's processes under a name of its own, with its role's rights. `extra` adds variables."""
    port = free_port()
    sections: list[Settings] = [
        stack.kafka(role),
        stack.objects,
        stack.keys,
        ProcessSettings(name=name, home=stack.home / name, metrics_port=port),
    ]
    if role in stack.redis_users:
        sections.append(stack.redis(role))
    if role == Role.ROUTER:
        operator = stack.redis(Role.OPERATOR)
        sections.append(KeeperSettings(url=operator.url, username=operator.username, password=operator.password))
    env = {variable: value for section in sections for variable, value in section.environment().items()}
    (stack.home / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", f"consumers.{role}"),
        env={**env, **(extra or {})},
        folder=REPOSITORY,
        ready=SaysReady(port),
    )


def engine_spec(stack: StackFile, name: str, role: str, engine: EngineSettings, pool: str) -> ProcessSpec:
    """A worker or a gate: a process that owns an engine, which takes its time to become ready."""
    extra = {**ENGINE_ENVIRONMENT, **engine.environment(), **PoolSettings(name=pool).environment()}
    spec = process_spec(stack, name, role, extra)
    return replace(spec, ready_seconds_max=ENGINE_READY_SECONDS_MAX, stop_seconds_max=ENGINE_STOP_SECONDS_MAX)
