"""Opens a closed ledger again by itself: whoever may, folds it from the log, one process at a time."""

import asyncio
from collections.abc import Callable

from infra.kafka.clients import KafkaError
from infra.logs import ActionLog
from infra.redis import Client
from infra.settings import KafkaSettings
from ledger.functions.calls import LedgerUnavailable
from ledger.rebuild import RebuildBusy, RebuildOvertaken, rebuild
from ledger.store import Ledger
from schemas.errors import SwitchyardError

log = ActionLog("keeper")

LOOK_S = 0.25
# After a rebuild that failed: what made it fail is not mended in a moment.
RETRY_S = 2.0
# Longer than folding 10^5 events takes: a keeper that died in the middle of it is followed by another after this.
PATIENCE_MS = 30_000
REBUILDING = "the ledger is being rebuilt from the log"


class Keeper:
    """Looks at the ledger, and rebuilds it where it is closed. `say` hears why it is closed, or None."""

    def __init__(self, kafka: KafkaSettings, operator: Client, say: Callable[[str | None], None]) -> None:
        self._kafka = kafka
        self._operator = operator
        self._ledger = Ledger(operator)
        self._say = say

    async def run(self) -> None:
        while True:
            pause_s = LOOK_S if await self.look() else RETRY_S
            await asyncio.sleep(pause_s)

    async def look(self) -> bool:
        """One look, and a rebuild where it is needed. False where that failed."""
        try:
            if not (await self._ledger.status()).open:
                await self._rebuild()
        except (SwitchyardError, KafkaError, OSError) as error:
            # Redis or Kafka is away, or the audit cannot be read: closed, and said why.
            self._say(str(error) or type(error).__name__)
            if not isinstance(error, LedgerUnavailable):
                log.error("ledger.not_rebuilt", detail=str(error))
            return False
        self._say(None)
        return True

    async def _rebuild(self) -> None:
        self._say(REBUILDING)
        try:
            done = await rebuild(self._kafka, self._operator, PATIENCE_MS)
        except (RebuildBusy, RebuildOvertaken):
            # Another keeper is at it.
            return
        log.warning("ledger.rebuilt", epoch=done.epoch, leases=done.leases, jobs=done.rows, records=done.records)
