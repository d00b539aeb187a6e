"""What is done with a batch of usage: lease ended, `Finished` appended, in this order, both as often as it comes."""

import asyncio
from collections.abc import Sequence

from infra.clock import Clock
from infra.failpoints import Failpoints
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import Incoming, dead_letter
from infra.logs import ActionLog
from infra.metrics import Metrics
from ledger.answers import Settled
from ledger.fold import used_of
from ledger.store import Ledger, LedgerUnavailable
from schemas.audit import Finished
from schemas.errors import InvalidRecord
from schemas.jobs import RejectReason
from schemas.metering import UsageRecorded

log = ActionLog("settler")

# Longer than a rebuild takes; shorter than the time after which the group would take the partitions away (5 min).
LEDGER_WAIT_S_MAX = 240.0
LEDGER_LOOK_S = 0.2

Usage = tuple[Incoming, UsageRecorded]


class Settler:
    """Applies committed usage. Killed at any point, the same records come again and change nothing twice."""

    def __init__(
        self,
        ledger: Ledger,
        audit: AuditWriter,
        publisher: Publisher,
        metrics: Metrics,
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self._ledger = ledger
        self._audit = audit
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._failpoints = failpoints
        self.waits_for_ledger = False

    async def apply(self, records: Sequence[Incoming]) -> None:
        """Do everything that must be done before the offsets of these records may be committed."""
        usages, refused = [], []
        for record in records:
            try:
                usages.append((record, UsageRecorded.decode(record.value)))
            except InvalidRecord as error:
                log.warning("usage.unreadable", source=str(record.coordinates), detail=str(error))
                refused.append(dead_letter(record, "settler", RejectReason.INVALID_RECORD.value, str(error)))
        self._failpoints.reach("settler.taken")
        await asyncio.gather(*(self._settle(usage) for _, usage in usages))
        self._failpoints.reach("settler.settled")
        await self._audit.append_all(
            [(usage.identity.adapter, finished(*pair)) for pair in usages for usage in pair[1:]]
        )
        await self._publisher.send_all(refused)
        self._failpoints.reach("settler.finished")
        self._metrics.count("records_consumed", len(records))
        self._metrics.count("records_dead_lettered", len(refused))

    async def _settle(self, usage: UsageRecorded) -> None:
        """Settle one job; wait while the ledger is closed or away. Raises LedgerUnavailable when it stays so."""
        deadline = self._clock.monotonic() + LEDGER_WAIT_S_MAX
        while not await self._settled(usage):
            self.waits_for_ledger = True
            self._metrics.set("ledger_open", 0)
            if self._clock.monotonic() > deadline:
                raise LedgerUnavailable(f"the ledger stayed closed for {LEDGER_WAIT_S_MAX:g} s")
            await asyncio.sleep(LEDGER_LOOK_S)
        self.waits_for_ledger = False
        self._metrics.set("ledger_open", 1)

    async def _settled(self, usage: UsageRecorded) -> bool:
        began = self._clock.monotonic()
        try:
            answer = await self._ledger.settle(usage.identity.tenant, usage.job_id, usage.ingress, used_of(usage))
        except LedgerUnavailable as error:
            log.warning("ledger.unavailable", detail=str(error))
            return False
        self._metrics.observe("ledger_call_seconds", self._clock.monotonic() - began, call="settle")
        match answer:
            case Settled(repeated=repeated):
                if not repeated:
                    self._metrics.count("usage_settled", outcome=usage.outcome.value)
                return True
        return False


def finished(record: Incoming, usage: UsageRecorded) -> Finished:
    """The outcome as the audit keeps it: from a committed record, at its place."""
    return Finished(
        identity=usage.identity,
        job_id=usage.job_id,
        attempt=usage.attempt,
        outcome=usage.outcome,
        usage=usage.usage,
        metering=record.coordinates,
        reply_hash=usage.reply_hash,
        service=usage.service,
    )
