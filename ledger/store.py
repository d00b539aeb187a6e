"""The ledger as a process sees it: one round trip per call, and never an open door.

Every method answers `Closed` while the ledger has not been rebuilt since its Redis started, and raises LedgerUnavailable
where no answer came (the call may or may not have happened: all of them are idempotent, so ask again).
"""

from redis.asyncio import Redis

from ledger.answers import (
    Admission,
    AdmitAnswer,
    BeginAnswer,
    CancelAnswer,
    Closed,
    Refusal,
    RefuseAnswer,
    SettleAnswer,
    Status,
)
from schemas.errors import SwitchyardError
from schemas.ids import Digest, JobId, TenantId
from schemas.jobs import Route
from schemas.record import Coordinates


class LedgerUnavailable(SwitchyardError):
    """The ledger gave no answer in time."""


class Ledger:
    """The Redis function library `switchyard`. Build the client with infra.redis.connect."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def admit(self, admission: Admission) -> AdmitAnswer:
        """Take concurrency, a place in the window and a reference on the digest together, or nothing."""
        raise NotImplementedError

    async def refuse(self, refusal: Refusal) -> RefuseAnswer:
        """Remember a permanent refusal; the first word on a job id stands and is answered."""
        raise NotImplementedError

    async def begin(self, tenant: TenantId, job_id: JobId, request: Coordinates, fence: str) -> BeginAnswer:
        """Start an execution of the record at `request`. Not idempotent: every call is one more attempt."""
        raise NotImplementedError

    async def hand_over(self, tenant: TenantId, job_id: JobId, request: Coordinates, attempt: int) -> bool:
        """End an execution in order: the next begin counts no crash. False where that could not be noted."""
        raise NotImplementedError

    async def adopt(self, route: Route) -> bool | Closed:
        """Know a job whose signed route was verified but whose lease was lost. True if it was unknown."""
        raise NotImplementedError

    async def cancel(self, tenant: TenantId, job_id: JobId) -> CancelAnswer:
        """Take a job back, also one that has not arrived."""
        raise NotImplementedError

    async def settle(self, tenant: TenantId, job_id: JobId, ingress: Coordinates) -> SettleAnswer:
        """End the lease of the job that came from `ingress`."""
        raise NotImplementedError

    async def references(self, digest: Digest) -> int | Closed:
        """How many leases hold a digest."""
        raise NotImplementedError

    async def status(self) -> Status:
        raise NotImplementedError

    async def close(self) -> None:
        await self._redis.aclose()
