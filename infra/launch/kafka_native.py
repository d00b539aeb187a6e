"""A single Kafka broker (KRaft) run from its jars: configuration, format, and the process to start."""

import secrets
import subprocess
from pathlib import Path
from typing import Final

from infra.files import write_private
from infra.launch.plan import PortOpens, ProcessSpec
from infra.launch.start import StartFailed

MAIN_CLASS: Final = "kafka.Kafka"
FORMAT_SECONDS_MAX: Final = 60
# Small and soon up: one core's collector, no optimising compiler, and few threads.
JVM_OPTIONS: Final = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
LOG_OPTIONS: Final = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true")
# The controller's listener cannot use SCRAM: those users live in the log that it has yet to open.
PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
listeners=CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=CLIENT://127.0.0.1:{port}
listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT
inter.broker.listener.name=CLIENT
controller.listener.names=CONTROLLER
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
sasl.mechanism.controller.protocol=PLAIN
listener.name.client.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule \
required username="broker" password="{broker}";
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule \
required username="controller" password="{controller}" user_controller="{controller}";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:broker;User:controller;User:admin
allow.everyone.if.no.acl.found=false
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.dirs={data}
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
"""


def kafka_spec(folder: Path, jars: Path, ports: tuple[int, int], passwords: dict[str, str]) -> ProcessSpec:
    """Write the broker's configuration, format its data folder the first time, and say how to run it.

    `passwords` holds those of `broker`, `controller` and `admin`. Raises StartFailed.
    """
    if not any(jars.glob("kafka_2.13-*.jar")):
        raise StartFailed(f"there is no Kafka in {jars}; fetch it with: make setup")
    properties = write_properties(folder, ports, passwords)
    java = ("java", *JVM_OPTIONS, *LOG_OPTIONS, "-cp", f"{jars}/*")
    if not (folder / "data" / "meta.properties").exists():
        _format(java, folder, properties, passwords)
    argv = (*java, MAIN_CLASS, str(properties))
    return ProcessSpec(name="kafka", argv=argv, folder=folder, ready=PortOpens(ports[0]))


def write_properties(folder: Path, ports: tuple[int, int], passwords: dict[str, str]) -> Path:
    """Write the broker's configuration and return its path."""
    port, controller_port = ports
    text = PROPERTIES.format(
        port=port,
        controller_port=controller_port,
        broker=passwords["broker"],
        controller=passwords["controller"],
        data=folder / "data",
    )
    path = folder / "server.properties"
    write_private(path, text.encode())
    return path


def cluster_id() -> str:
    """Kafka's form of a random UUID; a leading hyphen would read as an option."""
    return f"S{secrets.token_urlsafe(16)[1:]}"


def _format(java: tuple[str, ...], folder: Path, properties: Path, passwords: dict[str, str]) -> None:
    """The first users must be in the log before the first connection; the rest are made through it."""
    users = [
        argument
        for user in ("broker", "admin")
        for argument in ("--add-scram", f"SCRAM-SHA-512=[name={user},password={passwords[user]}]")
    ]
    arguments = ["format", "--standalone", "--cluster-id", cluster_id(), "--config", str(properties)]
    _tool(java, folder, "kafka.tools.StorageTool", [*arguments, *users])


def _tool(java: tuple[str, ...], folder: Path, tool: str, arguments: list[str]) -> str:
    done = subprocess.run(
        [*java, tool, *arguments], cwd=folder, capture_output=True, text=True, timeout=FORMAT_SECONDS_MAX, check=False
    )
    if done.returncode != 0:
        raise StartFailed(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
