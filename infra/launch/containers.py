"""Kafka and Redis as containers: the same configuration, run by `docker compose` and infra/compose.yaml."""

import os
from dataclasses import replace
from typing import Final

from infra.launch.kafka_native import cluster_id, write_properties
from infra.launch.plan import REPOSITORY, PortOpens, ProcessSpec
from infra.launch.redis_native import redis_spec
from infra.settings import StackFile

COMPOSE: Final = REPOSITORY / "infra/compose.yaml"
# An image may have to be fetched first.
READY_SECONDS_MAX: Final = 600.0


def container_specs(file: StackFile, ports: tuple[int, int, int]) -> tuple[ProcessSpec, ...]:
    """Write the configuration of both, and say how to run them. Stopping the process stops its container."""
    kafka_port, controller_port, redis_port = ports
    write_properties(file.home / "kafka", (kafka_port, controller_port), file.kafka_users)
    (file.home / "kafka" / "data").mkdir(exist_ok=True, mode=0o700)
    redis = redis_spec(file.home / "redis", redis_port, file.redis_users)
    env = {
        "STACK_HOME": str(file.home),
        "STACK_USER": f"{os.getuid()}:{os.getgid()}",
        "CLUSTER_ID": cluster_id(),
        "BROKER_PASSWORD": file.kafka_users["broker"],
        "ADMIN_PASSWORD": file.kafka_users["admin"],
    }
    kafka = ProcessSpec(
        name="kafka",
        argv=_compose("kafka"),
        env=env,
        folder=REPOSITORY,
        ready=PortOpens(kafka_port),
        ready_seconds_max=READY_SECONDS_MAX,
    )
    return (
        replace(redis, argv=_compose("redis"), env=env, folder=REPOSITORY, ready_seconds_max=READY_SECONDS_MAX),
        kafka,
    )


def _compose(service: str) -> tuple[str, ...]:
    return ("docker", "compose", "--file", str(COMPOSE), "up", "--no-log-prefix", service)
