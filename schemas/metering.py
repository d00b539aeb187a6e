"""Metering: one record for every admitted job, zero tokens included."""

from typing import Literal

from schemas.ids import Count, Digest, JobId
from schemas.jobs import JobClass, Outcome
from schemas.record import Coordinates, Identity, Record
from schemas.replies import Usage
from schemas.service import Service


class UsageRecorded(Record):
    """What an admitted job used. Committed in one transaction with its final reply and its input offset."""

    type: Literal["UsageRecorded"] = "UsageRecorded"
    version: Literal[1] = 1
    identity: Identity
    job_id: JobId
    job_class: JobClass
    attempt: Count
    outcome: Outcome
    usage: Usage
    ingress: Coordinates
    request: Coordinates
    ledger_epoch: Count
    engine: str
    worker: str
    # None when the job never started.
    started_at_ms: Count | None
    ended_at_ms: Count
    reply_hash: Digest
    # None where the job never reached a queue, or was written before this was recorded.
    service: Service | None = None
