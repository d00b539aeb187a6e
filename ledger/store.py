"""The ledger as a process sees it: one round trip per call, and never an open door.

Every method answers `Closed` while the ledger has not been rebuilt since its Redis started. It raises LedgerUnavailable
where no answer came: the call may or may not have happened. All but `begin` are idempotent, so ask again; a second
`begin` is a second attempt, and counts the first as a crash.
"""

from typing import Any, Final

from infra.redis import Client
from ledger import keys
from ledger.answers import (
    MEMORY_MS,
    RETRY_AFTER_MS,
    SWEEP_MAX,
    Admission,
    AdmitAnswer,
    BeginAnswer,
    Begun,
    BegunCancelled,
    BodyDiffers,
    CancelAnswer,
    CancelRemembered,
    Closed,
    Decision,
    Elsewhere,
    Ended,
    Expired,
    Fenced,
    Flagged,
    Full,
    Granted,
    Refusal,
    RefuseAnswer,
    Refused,
    Remembered,
    Resource,
    SettleAnswer,
    Settled,
    Spent,
    Status,
    TakenBack,
    Unknown,
    Used,
)  # fmt: skip
from ledger.functions.calls import STATUS_SWEEP_MAX, LedgerUnavailable, LedgerUnreachable, call, row_arguments
from ledger.rows import Row
from schemas.ids import Digest, JobId, TenantId
from schemas.jobs import JobClass, RejectReason, Route
from schemas.record import Coordinates

__all__ = ["Ledger", "LedgerUnavailable", "LedgerUnreachable"]


class Ledger:
    """The Redis function library `switchyard`, by way of a client that infra.redis.connect made."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def admit(self, ask: Admission) -> AdmitAnswer:
        """Take concurrency, a place in the window and a reference on the digest together, or nothing."""
        decision = ask.decision
        answer = await self._call(
            "admit",
            keys.member_of(ask.tenant, ask.job_id),
            ask.body_hash,
            str(ask.ingress),
            decision.identity.adapter,
            keys.window_of(decision.pool, decision.partition),
            _numbers(ask),
            decision.encode(),
            " ".join(f"{tenant}={places}" for tenant, places in ask.reserved.items()),
            refusal=keys.refusal_key(ask.ingress),
        )
        match answer:
            case [b"leased", _, admitted_us, lease_us, epoch, lift]:
                return Granted(
                    decision=decision,
                    ingress=ask.ingress,
                    admitted_at_us=int(admitted_us),
                    lease_ends_at_us=int(lease_us),
                    epoch=int(epoch),
                    lift=int(lift),
                    repeated=False,
                )
            case [b"full", _, resource, retry_after_ms]:
                return Full(resource=Resource(resource.decode()), retry_after_ms=int(retry_after_ms))
            case [b"expired", _]:
                return Expired()
            case [b"closed", _]:
                return Closed()
        return _remembered(answer)

    async def refuse(self, refusal: Refusal) -> RefuseAnswer:
        """Remember a permanent refusal; the first word on a job id stands and is answered."""
        answer = await self._call(
            "refuse",
            keys.member_of(refusal.tenant, refusal.job_id),
            refusal.body_hash,
            str(refusal.ingress),
            refusal.reason.value,
            refusal.message,
            refusal.memory_ms,
        )
        return Closed() if answer[0] == b"closed" else _remembered(answer)

    async def begin(self, tenant: TenantId, job_id: JobId, request: Coordinates, fence: str) -> BeginAnswer:
        """Start an execution of the record at `request`; `fence` is `<producer id>.<epoch>` of its partition."""
        answer = await self._call("begin", keys.member_of(tenant, job_id), str(request), fence)
        match answer:
            case [b"begun", _, attempt, crashes, remaining_ms]:
                return Begun(attempt=int(attempt), crashes=int(crashes), remaining_ms=int(remaining_ms))
            case [b"cancelled", _, attempt]:
                return BegunCancelled(attempt=int(attempt))
            case [b"elsewhere", _, first]:
                return Elsewhere(request=keys.coordinates(first.decode()))
        return _BEGIN[answer[0]]

    async def hand_over(self, tenant: TenantId, job_id: JobId, request: Coordinates, attempt: int) -> bool:
        """End an execution in order: the next begin counts no crash. False where that could not be noted."""
        answer = await self._call("hand_over", keys.member_of(tenant, job_id), str(request), attempt)
        return bool(answer[0] == b"noted")

    async def adopt(self, route: Route) -> bool | Closed:
        """Know a job whose signed route was verified but whose lease was lost. True if it was unknown.

        The route exists only after `Admitted` was appended, so that this is the row which the next rebuild makes.
        """
        member = keys.member_of(route.identity.tenant, route.job_id)
        answer = await self._call("adopt", member, *row_arguments(member, Row.of_route(route)))
        return Closed() if answer[0] == b"closed" else answer[2] == b"1"

    async def cancel(self, tenant: TenantId, job_id: JobId) -> CancelAnswer:
        """Take a job back, also one that has not arrived."""
        answer = await self._call("cancel", keys.member_of(tenant, job_id), MEMORY_MS)
        match answer:
            case [b"flagged", _, decision, ingress]:
                return Flagged(decision=Decision.decode(decision), ingress=keys.coordinates(ingress.decode()))
        return _CANCEL[answer[0]]

    async def settle(self, tenant: TenantId, job_id: JobId, ingress: Coordinates, used: Used) -> SettleAnswer:
        """End the lease of the job that came from `ingress`, and count what it used instead of what it reserved."""
        member = keys.member_of(tenant, job_id)
        spent = (used.prompt_tokens, used.completion_tokens, used.load_ms)
        answer = await self._call("settle", member, str(ingress), *spent, MEMORY_MS)
        return Closed() if answer[0] == b"closed" else Settled(repeated=answer[2] == b"1")

    async def references(self, digest: Digest) -> int | Closed:
        """How many leases hold a digest."""
        answer = await self._call("references", "", digest, SWEEP_MAX)
        return Closed() if answer[0] == b"closed" else int(answer[2])

    async def status(self) -> Status:
        """What is held now. A ledger without its function library is closed too."""
        answer = await self._call("status", "", STATUS_SWEEP_MAX)
        if answer[0] == b"closed":
            return Status(open=False, epoch=0, leases=0)
        _, _, is_open, epoch, leases, now_us, counts, spent = answer
        held = _counts(counts)
        return Status(
            open=is_open == b"1",
            epoch=int(epoch),
            leases=int(leases),
            tenants=_named(held, "t|"),
            adapters=_named(held, "a|"),
            windows=_named(held, "w|"),
            references=_named(held, "r|"),
            spent=_spent(spent),
            now_us=int(now_us),
        )

    async def fairness(self) -> dict[TenantId, int] | Closed:
        """The fairness counter of every tenant that was admitted something in the last minute."""
        answer = await self._call("fairness", "")
        if answer[0] == b"closed":
            return Closed()
        return {tenant: spent.counter for tenant, spent in _spent(answer[2]).items()}

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(self, function: str, member: str, *arguments: str | bytes | int, refusal: str = "") -> list[Any]:
        return await call(self._redis, function, member, *arguments, refusal=refusal)


_BEGIN: Final[dict[bytes, BeginAnswer]] = {
    b"fenced": Fenced(), b"ended": Ended(), b"unknown": Unknown(), b"closed": Closed(),
}  # fmt: skip
_CANCEL: Final[dict[bytes, CancelAnswer]] = {
    b"remembered": CancelRemembered(), b"ended": Ended(), b"closed": Closed(),
}  # fmt: skip
_REMEMBERED: Final[dict[bytes, Remembered]] = {
    b"taken_back": TakenBack(), b"ended": Ended(), b"differs": BodyDiffers(),
}  # fmt: skip


def _remembered(answer: list[Any]) -> Remembered:
    match answer:
        case [b"granted", _, decision, ingress, admitted_us, lease_us, epoch, lift]:
            return Granted(
                decision=Decision.decode(decision),
                ingress=keys.coordinates(ingress.decode()),
                admitted_at_us=int(admitted_us),
                lease_ends_at_us=int(lease_us),
                epoch=int(epoch),
                lift=int(lift),
                repeated=True,
            )
        case [b"refused", _, reason, message, ingress]:
            return Refused(
                reason=RejectReason(reason.decode()),
                message=(message or b"").decode(),
                ingress=keys.coordinates(ingress.decode()),
            )
    return _REMEMBERED[answer[0]]


def _numbers(ask: Admission) -> str:
    """What of an admission is a number, as one argument (ledger/functions/leases.lua)."""
    decision, limits = ask.decision, ask.decision.limits
    numbers = (
        int(decision.job_class is JobClass.INTERACTIVE), ask.concurrency_max, ask.adapter_concurrency_max,
        ask.tokens_per_minute, ask.tokens_per_day, ask.window_max, limits.prompt_tokens, limits.tokens_max,
        decision.weight, decision.expires_at_ms, ask.grace_ms, ask.memory_ms, RETRY_AFTER_MS, SWEEP_MAX,
    )  # fmt: skip
    return " ".join(map(str, numbers))


def _named(counts: dict[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


def _spent(flat: list[bytes]) -> dict[str, Spent]:
    """Tenant, minute, day, counter, and again."""
    return {
        flat[at].decode(): Spent(minute=int(flat[at + 1]), day=int(flat[at + 2]), counter=int(flat[at + 3]))
        for at in range(0, len(flat), 4)
    }


def _counts(flat: list[bytes]) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}
