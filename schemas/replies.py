"""What a tenant reads back: chunks as a preview, one final reply as the truth."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas.ids import Count, Digest, JobId, TenantId
from schemas.jobs import Outcome, RejectReason
from schemas.record import Coordinates, Identity, Record, Value


class FinishReason(StrEnum):
    """Why generation ended, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"


class Usage(Value):
    """Tokens used by one job."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class Receipt(Value):
    """The identity block on every final reply: what ran, which execution of it, and on what build."""

    identity: Identity
    attempt: Count
    # <producer id>.<epoch> of the transactional producer of the input partition.
    fence: str
    engine: str


class TokensGenerated(Record):
    """A chunk. Readers keep the highest attempt of a job and drop the rest."""

    type: Literal["TokensGenerated"] = "TokensGenerated"
    version: Literal[1] = 1
    job_id: JobId
    attempt: Count
    seq: Count
    text: str
    tokens: Count


class JobWaiting(Record):
    """A job waits in its own topic, and for what. A notice, written at most once per job and reason."""

    type: Literal["JobWaiting"] = "JobWaiting"
    version: Literal[1] = 1
    job_id: JobId
    ingress: Coordinates
    reason: RejectReason
    message: str


class JobCompleted(Record):
    """The final reply of a job that ran to its end. `text` is authoritative; chunks were a preview."""

    type: Literal["JobCompleted"] = "JobCompleted"
    version: Literal[1] = 1
    job_id: JobId
    ingress: Coordinates
    receipt: Receipt
    text: str
    finish_reason: FinishReason
    usage: Usage
    chunks: Count
    text_hash: Digest


FailedOutcome = Literal[Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.INTERRUPTED, Outcome.REVOKED]


class JobFailed(Record):
    """The final reply of an admitted job that did not complete. `text` is what had been produced until then."""

    type: Literal["JobFailed"] = "JobFailed"
    version: Literal[1] = 1
    job_id: JobId
    ingress: Coordinates
    receipt: Receipt
    outcome: FailedOutcome
    code: Annotated[str, Field(pattern=r"^[a-z_]{1,64}$")]
    message: str
    text: str
    usage: Usage
    chunks: Count


class JobRejected(Record):
    """A job that was not admitted. A retryable one is no outcome: the job id stays free.

    `job_id` is missing where the record was too broken to read one; `ingress` names the record in every case.
    """

    type: Literal["JobRejected"] = "JobRejected"
    version: Literal[1] = 1
    tenant: TenantId
    job_id: JobId | None
    ingress: Coordinates
    reason: RejectReason
    message: str
    retryable: bool
    retry_after_ms: Count | None = None


FinalReply = JobCompleted | JobFailed | JobRejected
FINAL_REPLIES: tuple[type[JobCompleted], type[JobFailed], type[JobRejected]] = (JobCompleted, JobFailed, JobRejected)
