"""Every Redis key, and the record of the log from which each can be made again."""

from schemas.ids import JobId, TenantId
from schemas.jobs import tenant_job
from schemas.record import Coordinates

# One hash tag: one slot, so that one call can change all of them.
PREFIX = "{switchyard}:"
PATTERN = PREFIX + "*"

GATE = PREFIX + "gate"
LEASES = PREFIX + "leases"
COUNTS = PREFIX + "counts"
RECENT = PREFIX + "recent"
JOB_PREFIX = PREFIX + "job:"
REFUSAL_PREFIX = PREFIX + "refusal:"
SPENT = PREFIX + "spent"
ASKED_PREFIX = PREFIX + "asked:"

BOOKS = (GATE, LEASES, COUNTS, RECENT)

_OF_LEASES = "Admitted without UsageRecorded, until lease_ends_at_us"
_OF_SECONDS = "none: what was asked in the last seconds, and is asked again"
#: key -> what it holds, and its source records.
SOURCES = {
    GATE: (
        "hash run_id, epoch, open, raised_us",
        "ledger_epoch of Admitted and UsageRecorded, raised by every rebuild",
    ),
    LEASES: ("sorted set job -> end in us", _OF_LEASES),
    COUNTS: (
        "hash of leases: t|tenant, a|tenant|digest, w|pool/partition, p|pool/partition|tenant, r|digest;"
        " next_us, before which none ends",
        _OF_LEASES,
    ),
    RECENT: ("sorted set tenant -> its last admission in us, to 5 s", "admitted_at_us of Admitted"),
    JOB_PREFIX + "<tenant>/<job id>": (
        "hash, the job's row, forgotten MEMORY_MS after its admission or with its lease",
        "Admitted, Started, CancelRequested, Rejected, UsageRecorded",
    ),
    SPENT: (
        "hash tenant -> its last admission, and sums of tokens by buckets of 5 s and by day and of costs by fairness"
        " period, by the admission's time, as one text of binary numbers",
        "Admitted: reserved; UsageRecorded: used; neither used nor begun when the lease ended: nothing",
    ),
    ASKED_PREFIX + "<pool/partition>": (
        "hash tenant -> when it last asked for a place in us, with which weight, until when it is waited for, as binary"
        " numbers; and '' -> the same of all together",
        _OF_SECONDS,
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
