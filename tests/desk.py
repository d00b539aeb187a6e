"""A router's admissions on a ledger in memory, and records as they would be read."""

from consumers.router.admission import Admissions
from consumers.router.effects import Effect, Effects
from consumers.router.intake import Work, read
from consumers.router.prompts import Words
from infra.kafka.publisher import Publisher
from infra.kafka.records import Incoming
from infra.metrics import Metrics
from infra.settings import KafkaSettings
from ledger.answers import Admission, AdmitAnswer
from ledger.registry import Registry
from ledger.store import LedgerUnavailable
from schemas.jobs import RequestRouted
from schemas.keys import KeyRole
from schemas.record import Record
from schemas.replies import JobRejected
from tests.factories import (
    KEYS_OF_ROLE,
    everybody,
    make_registry,
)
from tests.fakes_ledger import START_MS, MemoryLedger

KAFKA = KafkaSettings(bootstrap="nowhere:1", username="router", password="secret")


class StillClock:
    """Stands where the ledger's time stands, or a little later."""

    passed_ms = 0

    def now_ms(self) -> int:
        return START_MS + self.passed_ms

    def monotonic(self) -> float:
        return 0.0


class FailingLedger(MemoryLedger):
    """Admits, and then its answer may be lost."""

    failure: LedgerUnavailable | None = None

    async def admit(self, ask: Admission) -> AdmitAnswer:
        answer = await super().admit(ask)
        if self.failure:
            raise self.failure
        return answer


class Desk:
    """Admissions over a registry and a ledger, and records as they would be read."""

    def __init__(
        self,
        ledger: MemoryLedger | None = None,
        registry: Registry | None = None,
        counter: Words | None = None,
    ) -> None:
        self.ledger = ledger or MemoryLedger()
        self.registry = registry or make_registry()
        self.clock = StillClock()
        publisher = Publisher(KAFKA, "router-test", self.clock)
        effects = Effects(publisher, KEYS_OF_ROLE[KeyRole.ROUTE])
        self.admissions = Admissions(
            self.ledger, self.registry, everybody, effects, counter or Words(), "route-1", self.clock, Metrics()
        )
        self.admissions.closed = None
        self._offset = 0

    def work(self, content: Record | bytes, topic: str = "jobs.acme", in_doubt: bool = False) -> Work:
        self._offset += 1
        value = content if isinstance(content, bytes) else content.encode()
        headers = (("correlation_id", b"c-1"), ("tenant", b"globex"))
        record = Incoming(
            topic=topic, partition=0, offset=self._offset, timestamp_ms=START_MS, key=None, value=value, headers=headers
        )
        return read(record, in_doubt)

    async def post(self, content: Record | bytes, topic: str = "jobs.acme") -> Effect | None:
        return await self.answer(self.work(content, topic))

    async def answer(self, work: Work) -> Effect | None:
        await self.admissions.count([work])
        return await self.admissions.answer(work)


def reply_of(effect: Effect | None) -> JobRejected:
    assert effect is not None
    return JobRejected.decode(effect.replies[-1].value)


def request_of(effect: Effect | None) -> RequestRouted:
    assert effect is not None
    (outgoing,) = effect.appends
    return RequestRouted.decode(outgoing.value)
