"""Every Redis key, and the record of the log from which each can be made again."""

from schemas.ids import JobId, TenantId
from schemas.jobs import tenant_job
from schemas.record import Coordinates

# One hash tag: one slot, so that one call can change all of them.
PREFIX = "{switchyard}:"
PATTERN = PREFIX + "*"

GATE = PREFIX + "gate"
LEASES = PREFIX + "leases"
TENANTS = PREFIX + "tenants"
WINDOWS = PREFIX + "windows"
REFERENCES = PREFIX + "references"
JOB_PREFIX = PREFIX + "job:"
REFUSAL_PREFIX = PREFIX + "refusal:"

BOOKS = (GATE, LEASES, TENANTS, WINDOWS, REFERENCES)

#: key -> what it holds, and its source records.
SOURCES = {
    GATE: ("hash run_id, epoch, open", "ledger_epoch of Admitted and UsageRecorded, raised by every rebuild"),
    LEASES: ("sorted set job -> end in us", "Admitted without UsageRecorded, lease_ends_at_us"),
    TENANTS: ("hash tenant -> leases", "the same"),
    WINDOWS: ("hash pool/partition -> leases", "the same"),
    REFERENCES: ("hash adapter digest -> leases", "the same"),
    JOB_PREFIX + "<tenant>/<job id>": (
        "hash, the job's row, forgotten after MEMORY_MS",
        "Admitted, Started, CancelRequested, Rejected, UsageRecorded",
    ),
    REFUSAL_PREFIX + "<topic>/<partition>/<offset>": (
        "string, a capacity refusal of one ingress record, forgotten after MEMORY_MS",
        "none: a capacity refusal is no outcome, and a record that lost it is decided anew",
    ),
}


def job_key(member: str) -> str:
    return JOB_PREFIX + member


def refusal_key(ingress: Coordinates) -> str:
    return f"{REFUSAL_PREFIX}{ingress}"


def window_of(pool: str, partition: int) -> str:
    return f"{pool}/{partition}"


def member_of(tenant: TenantId, job_id: JobId) -> str:
    return tenant_job(tenant, job_id)


def coordinates(text: str) -> Coordinates:
    """The inverse of str(Coordinates). A topic's name holds no slash."""
    topic, partition, offset = text.split("/")
    return Coordinates(topic=topic, partition=int(partition), offset=int(offset))
