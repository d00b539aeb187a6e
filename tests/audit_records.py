"""Audit records of one job each, with defaults."""

from schemas.audit import Admitted, Finished, Impersonated, Started
from schemas.digest import digest_of
from schemas.impersonation import Impersonation
from schemas.jobs import JobClass, Outcome
from schemas.record import Coordinates, Identity
from schemas.replies import Usage

DIGEST = digest_of(b"adapter")
IDENTITY = Identity(tenant="acme", base=digest_of(b"b"), adapter=DIGEST, tokenizer=digest_of(b"t"))


def place(topic: str, offset: int) -> Coordinates:
    return Coordinates(topic=topic, partition=0, offset=offset)


def admitted(
    number: int = 1,
    identity: Identity = IDENTITY,
    ingress: int | None = None,
    impersonation: Impersonation | None = None,
) -> Admitted:
    return Admitted(
        identity=identity, job_id=f"job-{number}", job_class=JobClass.BATCH, alias="a", body_hash=digest_of(b"body"),
        ingress=place("batch.acme", number if ingress is None else ingress), pool="main", request_partition=0,
        tokens_max=1, context_max=1, decided_on={}, ledger_epoch=1, admitted_at_us=1, lease_ends_at_us=1,
        expires_at_ms=1, key_id="route-1", impersonation=impersonation,
    )  # fmt: skip


def impersonated(impersonation: Impersonation, number: int = 1) -> Impersonated:
    return Impersonated(
        identity=IDENTITY, job_id=f"job-{number}", ingress=place("batch.acme", number), impersonation=impersonation
    )


def started(number: int = 1, attempt: int = 1) -> Started:
    return Started(
        identity=IDENTITY, job_id=f"job-{number}", attempt=attempt, fence="1.0", request=place("requests.main", number),
        worker="w", engine="fake",
    )  # fmt: skip


def finished(
    number: int = 1, metering: int | None = None, outcome: Outcome = Outcome.COMPLETED, identity: Identity = IDENTITY
) -> Finished:
    return Finished(
        identity=identity, job_id=f"job-{number}", attempt=1, outcome=outcome, usage=Usage(prompt_tokens=2),
        metering=place("metering", number if metering is None else metering), reply_hash=digest_of(b"reply"),
    )  # fmt: skip
