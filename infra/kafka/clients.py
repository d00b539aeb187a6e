"""aiokafka's clients with every option that matters named, and a deadline around every wait.

aiokafka's own waits have none: `stop()` hangs for ever with the broker down (aio-libs/aiokafka#1101).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import AuthenticationFailedError, KafkaConnectionError
from aiokafka.errors import KafkaError as KafkaError

from infra.settings import KafkaSettings
from schemas.errors import SwitchyardError
from schemas.topics import BROKER_BYTES_MAX

START_S = 20.0
STOP_S = 5.0
SEND_S = 20.0
SESSION_MS = 8_000
HEARTBEAT_MS = 2_000
REBALANCE_MS = 15_000
TRANSACTION_MS = 5_000
FETCH_WAIT_MS = 100
# A batch larger than this limit would be skipped without a word (aio-libs/aiokafka#1173).
PARTITION_FETCH_BYTES = BROKER_BYTES_MAX + (1 << 16)

Result = TypeVar("Result")


class KafkaTimeout(SwitchyardError):
    """Kafka did not answer in time."""


class KafkaUnreachable(SwitchyardError):
    """Kafka cannot be reached, or does not let this user in."""


async def within(seconds: float, doing: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Await with a deadline. Raises KafkaTimeout that says what was being done."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise KafkaTimeout(f"Kafka did not answer within {seconds:g} s: {doing}") from error


def _connection(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "bootstrap_servers": settings.bootstrap,
        "security_protocol": settings.protocol,
        "sasl_mechanism": settings.mechanism,
        "sasl_plain_username": settings.username,
        "sasl_plain_password": settings.password,
    }


def make_consumer(settings: KafkaSettings, group: str | None = None, client_id: str = "switchyard") -> AIOKafkaConsumer:
    """A consumer that never commits by itself and sees committed records only. Others know it by its client id."""
    return AIOKafkaConsumer(
        client_id=client_id,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        rebalance_timeout_ms=REBALANCE_MS,
        partition_assignment_strategy=(RoundRobinPartitionAssignor,),
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        metadata_max_age_ms=30_000,
        retry_backoff_ms=50,
        check_crcs=True,
        **_connection(settings),
    )


def make_producer(settings: KafkaSettings, transactional_id: str | None = None, linger_ms: int = 0) -> AIOKafkaProducer:
    """An idempotent producer; a transactional one fences its predecessor of the same id when it starts."""
    return AIOKafkaProducer(
        acks="all",
        enable_idempotence=True,
        transactional_id=transactional_id,
        transaction_timeout_ms=TRANSACTION_MS,
        max_request_size=BROKER_BYTES_MAX,
        # One request at a time is under way for a partition: what a turn appends should fit into one.
        max_batch_size=1 << 19,
        linger_ms=linger_ms,
        # Back to back, a transaction waits for the one before to be cleared: ask again soon.
        retry_backoff_ms=10,
        **_connection(settings),
    )


def make_admin(settings: KafkaSettings) -> AIOKafkaAdminClient:
    return AIOKafkaAdminClient(**_connection(settings))


async def start(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """Start a client, or leave nothing of it behind. Raises KafkaTimeout, KafkaUnreachable."""
    try:
        await within(START_S, "connecting", client.start())
    except (KafkaConnectionError, AuthenticationFailedError) as error:
        await stop(client)
        raise KafkaUnreachable(f"Kafka cannot be reached, or does not let this user in: {error}") from error
    except BaseException:
        await stop(client)
        raise


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """Stop a client; one whose broker is gone is left to the garbage collector."""
    closing = client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop()
    try:
        await within(STOP_S, "closing", closing)
    except (KafkaTimeout, OSError):
        return
