"""What a ledger suite is run against, and what its tests ask with."""

from abc import abstractmethod
from typing import Any, Protocol

from ledger.answers import RETRY_AFTER_MS, Decision, Full, Resource
from ledger.store import Ledger
from tests.fakes_ledger import at, make_decision

WINDOW_FULL = Full(resource=Resource.WINDOW, retry_after_ms=RETRY_AFTER_MS)
TENANT_FULL = Full(resource=Resource.TENANT, retry_after_ms=RETRY_AFTER_MS)
REQUEST = at("requests.main", 5)


class Bench(Protocol):
    """A ledger with its surroundings."""

    ledger: Ledger

    @abstractmethod
    async def now_ms(self) -> int:
        """The ledger's own time."""

    @abstractmethod
    async def pass_ms(self, milliseconds: int) -> None:
        """Return when the ledger's time is that much later."""

    @abstractmethod
    async def shut(self) -> None:
        """Close the gate, as a rebuild does at first."""


async def decision_for(bench: Bench, tenant: str = "acme", left_ms: int = 60_000, **fields: Any) -> Decision:
    """A decision whose deadline is that far away on the ledger's clock."""
    decision = make_decision(tenant=tenant, expires_at_ms=await bench.now_ms() + left_ms)
    return decision.model_copy(update=fields)
