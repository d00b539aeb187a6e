"""The catalogue: every topic's name, key, partitions, retention, record types, writers and readers.

Provisioning, ACLs, the AsyncAPI document and the README table are made from it.
"""

from dataclasses import dataclass
from enum import StrEnum

from schemas import adapters, audit, jobs, keys, metering, replies, tenants
from schemas.record import ENVELOPE_BYTES_MAX, RECORD_BYTES_MAX, Record

HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS
YEAR_MS = 365 * DAY_MS
FOR_EVER = -1


class Role(StrEnum):
    """Who connects to Kafka. Every role but the tenant is one service user of that name."""

    TENANT = "tenant"
    ROUTER = "router"
    WORKER = "worker"
    SETTLER = "settler"
    GATE = "gate"
    RELEASE = "release"
    OPERATOR = "operator"
    AUDITOR = "auditor"


EVERY_SERVICE = frozenset(Role) - {Role.TENANT}


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One topic, or one per tenant or pool where the name holds a placeholder."""

    name: str
    key: str
    records: tuple[type[Record], ...]
    writers: frozenset[Role]
    readers: frozenset[Role]
    partitions: int
    retention_ms: int
    bytes_max: int = ENVELOPE_BYTES_MAX
    # A tenant cannot forge deadlines where the broker stamps the time.
    log_append_time: bool = False
    about: str = ""

    @property
    def tenant_writes(self) -> bool:
        return Role.TENANT in self.writers

    @property
    def prefix(self) -> str | None:
        """The literal part before a placeholder, which ends with a dot; None for a single topic."""
        head, brace, _ = self.name.partition("{")
        return head if brace else None

    def config(self) -> dict[str, str]:
        """Kafka's settings for it. No `retention.bytes`, no compaction, ever."""
        settings = {
            "cleanup.policy": "delete",
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.bytes_max),
        }
        if self.log_append_time:
            settings["message.timestamp.type"] = "LogAppendTime"
        if self.tenant_writes:
            # The broker then applies max.message.bytes to what a compressed record unpacks to.
            settings["compression.type"] = "uncompressed"
        return settings

    def of(self, owner: str) -> str:
        """The topic's name for one tenant or pool."""
        if self.prefix is None:
            raise ValueError(f"{self.name} has no placeholder")
        return f"{self.prefix}{owner}"


# A record of exactly 1 MiB must pass: the broker counts the batch around it too.
INGRESS_BYTES_MAX = RECORD_BYTES_MAX + 4096
BROKER_BYTES_MAX = ENVELOPE_BYTES_MAX + 65536


def _ingress(name: str, kind: type[Record], retention_ms: int, about: str) -> Topic:
    return Topic(
        name=name,
        key="job id",
        records=(kind,),
        writers=frozenset({Role.TENANT}),
        readers=frozenset({Role.ROUTER}),
        partitions=1,
        retention_ms=retention_ms,
        bytes_max=INGRESS_BYTES_MAX,
        log_append_time=True,
        about=about,
    )


def _record(name: str, key: str, records: tuple[type[Record], ...], writers: set[Role], about: str) -> Topic:
    """A small topic of one partition that every service folds from its beginning."""
    return Topic(
        name=name,
        key=key,
        records=records,
        writers=frozenset(writers),
        readers=EVERY_SERVICE,
        partitions=1,
        retention_ms=FOR_EVER,
        about=about,
    )


JOBS = _ingress("jobs.{tenant}", jobs.JobSubmitted, 2 * DAY_MS, "interactive jobs: refused when full")
BATCH = _ingress("batch.{tenant}", jobs.JobSubmitted, 2 * DAY_MS, "batch jobs: wait here when full")
CANCEL = _ingress("cancel.{tenant}", jobs.JobCancelled, 2 * DAY_MS, "cancellations: never wait behind jobs")
REQUESTS = Topic(
    name="requests.{pool}",
    key="adapter digest",
    records=(jobs.RequestRouted,),
    writers=frozenset({Role.ROUTER}),
    readers=frozenset({Role.WORKER}),
    partitions=4,
    retention_ms=2 * DAY_MS,
    bytes_max=BROKER_BYTES_MAX,
    about="admitted jobs, signed, on their way to the workers of a pool",
)
CANCELS = Topic(
    name="cancels.{pool}",
    key="job id",
    records=(jobs.RequestCancelled,),
    writers=frozenset({Role.ROUTER}),
    readers=frozenset({Role.WORKER}),
    partitions=1,
    retention_ms=HOUR_MS,
    about="cancellations of admitted jobs, read by every worker",
)
STREAM = Topic(
    name="stream.{tenant}",
    key="job id",
    records=(replies.TokensGenerated, replies.JobWaiting),
    writers=frozenset({Role.WORKER, Role.ROUTER}),
    readers=frozenset({Role.TENANT}),
    partitions=1,
    retention_ms=HOUR_MS,
    about="chunks of tokens and notices of waiting: a preview",
)
REPLIES = Topic(
    name="replies.{tenant}",
    key="job id",
    records=replies.FINAL_REPLIES,
    writers=frozenset({Role.WORKER, Role.ROUTER}),
    readers=frozenset({Role.TENANT}),
    partitions=1,
    retention_ms=WEEK_MS,
    bytes_max=BROKER_BYTES_MAX,
    about="one final reply per job",
)
METERING = Topic(
    name="metering",
    key="adapter digest",
    records=(metering.UsageRecorded,),
    writers=frozenset({Role.WORKER}),
    readers=frozenset({Role.SETTLER, Role.AUDITOR, Role.OPERATOR, Role.ROUTER}),
    partitions=4,
    retention_ms=3 * YEAR_MS,
    about="what each admitted job used",
)
AUDIT = Topic(
    name="audit",
    key="adapter digest",
    records=audit.AUDIT_RECORDS,
    writers=frozenset({Role.ROUTER, Role.WORKER, Role.SETTLER, Role.OPERATOR}),
    readers=frozenset({Role.AUDITOR, Role.OPERATOR, Role.SETTLER, Role.RELEASE, Role.ROUTER}),
    partitions=8,
    retention_ms=7 * YEAR_MS,
    log_append_time=True,
    about="what happened under each digest; never transactional, never compacted",
)
ADAPTERS = _record(
    "adapters",
    "adapter digest",
    (
        adapters.BaseAdded,
        adapters.AdapterSubmitted,
        adapters.AdapterGated,
        adapters.AdapterApproved,
        adapters.AdapterRevoked,
        adapters.AdapterDrained,
    ),
    {Role.RELEASE, Role.GATE, Role.WORKER},
    "the life of every adapter",
)
ALIASES = _record("aliases", "tenant/alias", (adapters.AliasPointed,), {Role.RELEASE}, "where each alias points")
TENANTS = _record(
    "tenants",
    "tenant",
    (tenants.TenantConfigured, tenants.AliasGranted, tenants.AliasWithdrawn),
    {Role.OPERATOR},
    "what each tenant may use, and which aliases it is granted",
)
POOLS = _record("pools", "pool", (adapters.PoolConfigured,), {Role.OPERATOR}, "the pools of workers")
WORKERS = _record(
    "workers", "worker", (adapters.WorkerReady, adapters.WorkerGone), {Role.WORKER}, "which worker serves what"
)
KEYS = _record("keys", "key id", (keys.KeyPublished, keys.KeyRevoked), {Role.OPERATOR}, "public signing keys")
DLQ = Topic(
    name="dlq",
    key="source topic",
    records=(),
    writers=frozenset({Role.ROUTER, Role.WORKER, Role.SETTLER}),
    readers=frozenset({Role.OPERATOR, Role.AUDITOR}),
    partitions=1,
    retention_ms=4 * WEEK_MS,
    bytes_max=BROKER_BYTES_MAX,
    about="refused records: the original bytes, with coordinates and reason in headers",
)

TOPICS: tuple[Topic, ...] = (
    JOBS, BATCH, CANCEL, REQUESTS, CANCELS, STREAM, REPLIES, METERING,
    AUDIT, ADAPTERS, ALIASES, TENANTS, POOLS, WORKERS, KEYS, DLQ,
)  # fmt: skip

PER_TENANT = tuple(topic for topic in TOPICS if topic.name.endswith("{tenant}"))
PER_POOL = tuple(topic for topic in TOPICS if topic.name.endswith("{pool}"))
SINGLE = tuple(topic for topic in TOPICS if topic.prefix is None)
# What the registry view folds, in every service.
REGISTRY = (ADAPTERS, ALIASES, TENANTS, POOLS, WORKERS, KEYS)

# Headers of dead letters: text, the original key and value untouched.
DLQ_REASON = "dlq.reason"
DLQ_DETAIL = "dlq.detail"
DLQ_TOPIC = "dlq.original.topic"
DLQ_PARTITION = "dlq.original.partition"
DLQ_OFFSET = "dlq.original.offset"
DLQ_TIMESTAMP = "dlq.original.timestamp"
DLQ_COMPONENT = "dlq.component"


def requests_group(pool: str) -> str:
    """The consumer group of a pool's workers. Members are known by their client id: the worker's name."""
    return f"{Role.WORKER}.{REQUESTS.of(pool)}"


def class_of(topic: str) -> tuple[str, "jobs.JobClass | None"]:
    """(tenant, class) of an ingress topic's name; class None for a cancel topic. Raises ValueError."""
    for entry, job_class in ((JOBS, jobs.JobClass.INTERACTIVE), (BATCH, jobs.JobClass.BATCH), (CANCEL, None)):
        if entry.prefix is not None and topic.startswith(entry.prefix):
            return topic.removeprefix(entry.prefix), job_class
    raise ValueError(f"{topic} is not an ingress topic")
