"""The router process: what it is made of, when it is ready, and how it stops."""

import asyncio
import gc
import uuid
from contextlib import AsyncExitStack

from consumers.router.admission import LEDGER_CLOSED, Admissions
from consumers.router.effects import Effects
from consumers.router.loop import Router
from consumers.router.members import Members, Watch
from consumers.router.prompts import Counter, Tokens, Words
from infra.failpoints import Failpoints
from infra.kafka.group import Group
from infra.kafka.members import GroupMembers
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Tail
from infra.logs import ActionLog
from infra.objects import open_objects
from infra.process import Process, run
from infra.redis import connect
from infra.settings import (
    KafkaSettings,
    KeeperSettings,
    KeySettings,
    ObjectSettings,
    RedisSettings,
    RouterSettings,
    read,
)
from ledger.answers import Closed
from ledger.fairness import jain
from ledger.keeper import Keeper
from ledger.registry import Registry
from ledger.store import Ledger, LedgerUnavailable
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from schemas.topics import BATCH, CANCEL, JOBS, REGISTRY

# A view that was complete this recently is complete; records on their way make it incomplete for a moment.
VIEW_FRESH_MS = 1_000
# Together with the above: nothing new is admitted on a view older than five seconds.
VIEW_STALE_S = 4.0
LEDGER_PROBE_S = 1.0
# A turn makes thousands of values and nearly no cycles: looking for some every 700 values took a fifth of the time.
COLLECT_EVERY = (100_000, 50, 50)
IDLE_S = 0.2

log = ActionLog("router")


def main() -> int:
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
    return run(_work)


async def _work(process: Process) -> None:
    kafka, keys = read(KafkaSettings), read(KeySettings)
    role = KeyRole.ROUTE
    key = SigningKey.from_pem(keys.key_id(role), role, keys.path(role).read_bytes())
    life = f"{process.name}-{uuid.uuid4().hex[:8]}"
    registry = Registry()

    def fold(record: Incoming) -> None:
        registry.apply(record.topic, record.offset, record.value)

    view = Tail(kafka, [topic.name for topic in REGISTRY], fold, process.clock)
    publisher = Publisher(kafka, life, process.clock)
    audit = AuditWriter(publisher, life)
    ledger = Ledger(connect(read(RedisSettings)))
    counter = _counter(read(RouterSettings), process)
    members, groups = Members(process.clock), GroupMembers(kafka)
    admissions = Admissions(
        ledger, registry, members.present, Effects(publisher, key), counter, key.key_id, process.clock, process.metrics
    )
    failpoints = Failpoints.from_environment()
    async with AsyncExitStack() as opened:
        opened.push_async_callback(ledger.close)
        opened.push_async_callback(counter.stop)
        for client in (publisher, view, groups):
            opened.push_async_callback(client.stop)
        await publisher.start()
        await audit.start()
        await view.start()
        await groups.start()
        async with asyncio.TaskGroup() as tasks:
            router = Router(admissions, publisher, audit, process.clock, process.metrics, failpoints, tasks)
            group = Group(kafka, "router", router.open, router.lose)
            opened.push_async_callback(group.stop)
            service = Service(process, view, registry, admissions, router, group, key)
            process.not_ready = service.not_ready
            followers = [
                tasks.create_task(view.run()),
                tasks.create_task(watch(ledger, admissions, process)),
                tasks.create_task(Watch(groups, members, view, registry, process.clock).run()),
            ]
            keeper = read(KeeperSettings).redis()
            if keeper is not None:
                operator = connect(keeper)
                opened.push_async_callback(operator.aclose)
                followers.append(tasks.create_task(Keeper(kafka, operator, admissions.ledger_said).run()))
            while not process.stopping.is_set():
                await service.turn()
            for follower in followers:
                follower.cancel()
        # Nothing of this life follows: the turn in hand was finished, the next one is another's.
        await audit.close()


def _counter(settings: RouterSettings, process: Process) -> Counter:
    without = Words() if settings.without_tokenizer == "words" else None
    return Tokens(open_objects(read(ObjectSettings)), process.settings.home / "tokenizers", without)


class Service:
    """The router's turns, for the tenants that are active now and as long as the registry view can be trusted."""

    def __init__(
        self,
        process: Process,
        view: Tail,
        registry: Registry,
        admissions: Admissions,
        router: Router,
        group: Group,
        key: SigningKey,
    ) -> None:
        self._process = process
        self._view = view
        self._registry = registry
        self._admissions = admissions
        self._router = router
        self._group = group
        self._key = key
        self._topics: set[str] = set()
        self._fresh_at = process.clock.monotonic()

    async def turn(self) -> None:
        await self._subscribe()
        problem = await self._view_problem()
        if problem != self._admissions.closed:
            log.warning("admission.changed", problem=problem or "none")
        self._admissions.closed = problem
        if self._topics:
            await self._router.turn(self._group)
        else:
            await self._view.wait_until(lambda: bool(self._registry.active_tenants()), IDLE_S)

    def not_ready(self) -> str | None:
        """What is awaited. Asked by the status server's thread: values are only read."""
        problem = self._admissions.closed or self._admissions.ledger_problem
        if problem is None and self._topics and not self._group.assigned:
            return "no partitions are assigned yet"
        return problem

    async def _subscribe(self) -> None:
        tenants = self._registry.active_tenants()
        topics = {topic.of(tenant) for tenant in tenants for topic in (JOBS, BATCH, CANCEL)}
        # The last tenant's removal leaves its topics subscribed: the decision refuses what comes.
        if not topics or topics == self._topics:
            return
        if self._topics:
            self._group.subscribe(topics)
        else:
            await self._group.start(topics)
        self._topics = topics
        log.info("tenants.subscribed", tenants=len(tenants))

    async def _view_problem(self) -> str | None:
        """Why nothing may be decided on this view. A moment behind is no problem; seconds are."""
        now = self._process.clock.monotonic()
        if await self._view.fresh(VIEW_FRESH_MS):
            self._fresh_at = now
        self._process.metrics.set("registry_stale_seconds", now - self._fresh_at)
        if now - self._fresh_at > VIEW_STALE_S:
            return "the registry view is stale: Kafka does not answer"
        return self._registry.signing_problem(self._key)


async def watch(ledger: Ledger, admissions: Admissions, process: Process) -> None:
    """Notice a ledger that closed or came back also while no job asks it, and how fairly it was shared."""
    while True:
        try:
            counters = await ledger.fairness()
            problem = LEDGER_CLOSED if isinstance(counters, Closed) else None
        except LedgerUnavailable as error:
            counters, problem = Closed(), str(error)
        if problem != admissions.ledger_problem:
            log.warning("ledger.changed", problem=problem or "none")
        admissions.ledger_problem = problem
        process.metrics.set("ledger_open", problem is None)
        if not isinstance(counters, Closed):
            process.metrics.set("fairness_jain", jain(counters.values()))
            process.metrics.set("fairness_gap", max(counters.values(), default=0) - min(counters.values(), default=0))
        await asyncio.sleep(LEDGER_PROBE_S)
