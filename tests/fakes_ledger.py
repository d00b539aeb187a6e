"""A ledger without Redis: the fold behind the same methods, and values to ask it with."""

from itertools import count
from typing import Any

from ledger.answers import (
    MEMORY_MS,
    Admission,
    AdmitAnswer,
    BeginAnswer,
    CancelAnswer,
    Closed,
    Decision,
    Refusal,
    RefuseAnswer,
    SettleAnswer,
    Status,
    Used,
)
from ledger.keys import member_of
from ledger.quota import Books
from ledger.rows import Row
from ledger.store import Ledger
from schemas.audit import Admitted, Started
from schemas.digest import digest_of
from schemas.jobs import JobClass, Limits, Outcome, RejectReason, Route
from schemas.metering import UsageRecorded
from schemas.record import Coordinates, Identity
from schemas.replies import Usage

# What a job of these tests uses: less than it reserves.
USED = Used(prompt_tokens=5, completion_tokens=7)
START_MS = 1_800_000_000_000
_offsets = count(1)


class MemoryLedger(Ledger):
    """Answers as the Redis functions do (tests/contracts/test_ledger.py). Time stands until it is moved."""

    def __init__(self, is_open: bool = True) -> None:
        self.books = Books()
        self.now_us = START_MS * 1000
        if is_open:
            self.reopen()

    def reopen(self, floor: int = 0) -> int:
        epoch = self.books.raise_epoch(floor)
        self.books.open()
        return epoch

    async def admit(self, ask: Admission) -> AdmitAnswer:
        return self.books.admit(ask, self.now_us)

    async def refuse(self, refusal: Refusal) -> RefuseAnswer:
        return self.books.refuse(refusal, self.now_us)

    async def begin(self, tenant: str, job_id: str, request: Coordinates, fence: str) -> BeginAnswer:
        return self.books.begin(member_of(tenant, job_id), request, fence, self.now_us)

    async def hand_over(self, tenant: str, job_id: str, request: Coordinates, attempt: int) -> bool:
        return self.books.hand_over(member_of(tenant, job_id), request, attempt, self.now_us)

    async def adopt(self, route: Route) -> bool | Closed:
        member = member_of(route.identity.tenant, route.job_id)
        return self.books.adopt(member, Row.of_route(route), self.now_us)

    async def cancel(self, tenant: str, job_id: str) -> CancelAnswer:
        return self.books.cancel(member_of(tenant, job_id), MEMORY_MS, self.now_us)

    async def settle(self, tenant: str, job_id: str, ingress: Coordinates, used: Used) -> SettleAnswer:
        return self.books.settle(member_of(tenant, job_id), ingress, used, MEMORY_MS, self.now_us)

    async def references(self, digest: str) -> int | Closed:
        return self.books.references(digest, self.now_us)

    async def status(self) -> Status:
        return self.books.status(self.now_us)

    async def fairness(self) -> dict[str, int] | Closed:
        return self.books.fairness(self.now_us) if self.books.is_open else Closed()

    async def close(self) -> None:
        return


def make_identity(tenant: str = "acme", adapter: str = "support") -> Identity:
    return Identity(
        tenant=tenant,
        base=digest_of(b"base"),
        adapter=digest_of(f"{tenant}/{adapter}".encode()),
        tokenizer=digest_of(b"tokenizer"),
    )


def make_decision(
    tenant: str = "acme",
    adapter: str = "support",
    job_class: JobClass = JobClass.INTERACTIVE,
    partition: int = 0,
    expires_at_ms: int = START_MS + 60_000,
) -> Decision:
    return Decision(
        identity=make_identity(tenant, adapter),
        job_class=job_class,
        alias=adapter,
        pool="main",
        partition=partition,
        limits=Limits(tokens_max=16, context_max=1024),
        decided_on={"adapters": 3, "aliases": 1},
        expires_at_ms=expires_at_ms,
        key_id="route-1",
    )


def at(topic: str = "jobs.acme", offset: int | None = None, partition: int = 0) -> Coordinates:
    """A place in the log; a new one unless its offset is given."""
    return Coordinates(topic=topic, partition=partition, offset=next(_offsets) if offset is None else offset)


# Limits that no test reaches by chance.
PLENTY: dict[str, Any] = {"adapter_concurrency_max": 1000, "tokens_per_minute": 10**9, "tokens_per_day": 10**9}


def make_admission(
    job_id: str = "job-1",
    decision: Decision | None = None,
    body: str = "body",
    ingress: Coordinates | None = None,
    concurrency_max: int = 8,
    window_max: int = 8,
    grace_ms: int = 30_000,
    **limits: Any,
) -> Admission:
    return Admission(
        job_id=job_id,
        body_hash=digest_of(body.encode()),
        ingress=ingress or at(),
        decision=decision or make_decision(),
        concurrency_max=concurrency_max,
        window_max=window_max,
        grace_ms=grace_ms,
        **{**PLENTY, **limits},
    )


def make_refusal(
    job_id: str = "job-1", body: str = "body", reason: RejectReason = RejectReason.UNKNOWN_ALIAS
) -> Refusal:
    return Refusal(
        tenant="acme",
        job_id=job_id,
        body_hash=digest_of(body.encode()),
        ingress=at(),
        reason=reason,
        message="There is no such alias.",
    )


def make_admitted(ask: Admission, admitted_at_us: int = START_MS * 1000, epoch: int = 1, lift: int = 0) -> Admitted:
    """The audit record of an admission."""
    decision = ask.decision
    return Admitted(
        identity=decision.identity,
        job_id=ask.job_id,
        job_class=decision.job_class,
        alias=decision.alias,
        body_hash=ask.body_hash,
        ingress=ask.ingress,
        pool=decision.pool,
        request_partition=decision.partition,
        tokens_max=decision.limits.tokens_max,
        context_max=decision.limits.context_max,
        decided_on=decision.decided_on,
        ledger_epoch=epoch,
        admitted_at_us=admitted_at_us,
        lease_ends_at_us=(decision.expires_at_ms + ask.grace_ms) * 1000,
        expires_at_ms=decision.expires_at_ms,
        prompt_tokens=decision.limits.prompt_tokens,
        weight=decision.weight,
        lift=lift,
        key_id=decision.key_id,
    )


def make_route(ask: Admission, admitted_at_us: int = START_MS * 1000, epoch: int = 1, lift: int = 0) -> Route:
    decision = ask.decision
    return Route(
        **decision.model_dump(exclude={"identity", "limits"}),
        identity=decision.identity,
        limits=decision.limits,
        job_id=ask.job_id,
        body_hash=ask.body_hash,
        ingress=ask.ingress,
        ledger_epoch=epoch,
        admitted_at_us=admitted_at_us,
        lift=lift,
    )


def make_started(ask: Admission, attempt: int = 1, request: Coordinates | None = None, fence: str = "7.0") -> Started:
    return Started(
        identity=ask.decision.identity,
        job_id=ask.job_id,
        attempt=attempt,
        fence=fence,
        request=request or at("requests.main"),
        worker="worker-1",
        engine="fake",
    )


def make_usage(ask: Admission, attempt: int = 1, outcome: Outcome = Outcome.COMPLETED, epoch: int = 1) -> UsageRecorded:
    return UsageRecorded(
        identity=ask.decision.identity,
        job_id=ask.job_id,
        job_class=ask.decision.job_class,
        attempt=attempt,
        outcome=outcome,
        usage=Usage(prompt_tokens=5, completion_tokens=7),
        ingress=ask.ingress,
        request=at("requests.main"),
        ledger_epoch=epoch,
        engine="fake",
        worker="worker-1",
        started_at_ms=START_MS,
        ended_at_ms=START_MS + 100,
        reply_hash=digest_of(b"reply"),
    )
