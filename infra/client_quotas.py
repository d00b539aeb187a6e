"""Kafka's own limits on what one user may send and fetch. Neither Python client can set them: Kafka's tool does."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from infra.files import write_private
from infra.provision import ProvisioningFailed
from infra.settings import KafkaSettings, LaunchSettings, read

TOOL: Final = "kafka.admin.ConfigCommand"
TOOL_SECONDS_MAX: Final = 60.0
JARS: Final = Path(__file__).parents[1] / ".cache/kafka/libs"
LOGIN: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"


def set_client_quota(admin: KafkaSettings, user: str, produce_bytes_per_s: int, consume_bytes_per_s: int) -> None:
    """Limit one user on every broker. May be repeated. Raises ProvisioningFailed."""
    quota = f"producer_byte_rate={produce_bytes_per_s},consumer_byte_rate={consume_bytes_per_s}"
    _run(admin, "--alter", "--add-config", quota, "--entity-type", "users", "--entity-name", user)


def client_quota(admin: KafkaSettings, user: str) -> str:
    """What Kafka says of one user's limits."""
    return _run(admin, "--describe", "--entity-type", "users", "--entity-name", user)


def _run(admin: KafkaSettings, *arguments: str) -> str:
    jars = read(LaunchSettings).jars or JARS
    if shutil.which("java") is None or not jars.is_dir():
        raise ProvisioningFailed("Kafka client quotas need Java and Kafka's jars on this machine: make setup")
    with tempfile.TemporaryDirectory(prefix="switchyard-") as folder:
        login = Path(folder) / "admin.properties"
        write_private(login, _properties(admin).encode())
        command = [
            "java", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", TOOL,
            "--bootstrap-server", admin.bootstrap, "--command-config", str(login), *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS_MAX, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no message"]
        raise ProvisioningFailed(f"Kafka did not set the client quota: {last[0][:300]}")
    return done.stdout


def _properties(admin: KafkaSettings) -> str:
    return (
        f"security.protocol={admin.protocol}\nsasl.mechanism={admin.mechanism}\n"
        f'sasl.jaas.config={LOGIN} required username="{admin.username}" password="{admin.password}";\n'
    )
