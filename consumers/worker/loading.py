"""The queue of loads: one that a job waits for and one ahead of its turn at a time, and what each is charged to."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from consumers.engines.protocol import EngineDead
from consumers.worker.adapters import Adapters, Brought, NoSlot, Unloadable
from consumers.worker.run import Runs
from consumers.worker.scheduler import Scheduler
from infra.clock import Clock
from infra.logs import ActionLog
from schemas.audit import LoadReason

log = ActionLog("worker")

# After a load that found no slot, and after a prefetch that found no room or no store.
RETRY_S = 0.1
PREFETCH_RETRY_S = 1.0


class Loads:
    """Follows the scheduler's plan, which bounds what waits; the engine sets room aside for what is on its way."""

    def __init__(
        self,
        adapters: Adapters,
        scheduler: Scheduler,
        runs: Runs,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        wake: Callable[[], object],
        unloadable: Callable[[str, Unloadable], object],
    ) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._runs = runs
        self._clock = clock
        self._tasks = tasks
        self._wake = wake
        self._unloadable = unloadable
        self._changing = False
        self._fetching = False

    def follow(self, load: str | None, prefetch: Sequence[str]) -> None:
        """Start what the plan asks for, as far as nothing of its kind is under way."""
        if load is not None and not self._changing:
            self._changing = True
            self._expect(load)
            self._tasks.create_task(self._load(load))
        ahead = next((digest for digest in prefetch if self._may_prefetch(digest)), None)
        if ahead is not None and not self._fetching:
            self._fetching = True
            self._expect(ahead)
            self._tasks.create_task(self._prefetch(ahead))

    def expel(self) -> None:
        """What failed here leaves the engine as soon as nothing runs under it."""
        if not self._changing and self._adapters.to_expel(self._runs.digests):
            self._changing = True
            self._tasks.create_task(self._expel())

    def _in_slots(self) -> frozenset[str]:
        return self._scheduler.wanted() | self._runs.digests

    def _may_prefetch(self, digest: str) -> bool:
        return digest not in self._adapters.in_host() and not self._adapters.is_quarantined(digest)

    async def _load(self, digest: str) -> None:
        in_slots, working = self._in_slots, self._scheduler.working
        try:
            self._charge(digest, await self._adapters.make_resident(digest, in_slots, working, LoadReason.JOB))
        except NoSlot:
            await asyncio.sleep(RETRY_S)
        except EngineDead:
            # The watch ends this worker, after it told the ledger that no job is to blame.
            return
        except Unloadable as error:
            log.warning("adapter.not_loaded", adapter=digest, code=error.code)
            self._unloadable(digest, error)
        self._changing = False
        self._scheduler.came(digest)
        self._wake()

    async def _prefetch(self, digest: str) -> None:
        """Where it fails, the turn of the digest tries again and says so."""
        try:
            self._charge(digest, await self._adapters.prefetch(digest))
        except EngineDead:
            return
        except (NoSlot, Unloadable):
            await asyncio.sleep(PREFETCH_RETRY_S)
        self._fetching = False
        self._scheduler.came(digest)
        self._wake()

    def _expect(self, digest: str) -> None:
        if digest not in self._adapters.in_host():
            self._scheduler.coming(digest, self._adapters.owner_of(digest))

    def _charge(self, digest: str, brought: Brought) -> None:
        owner, now = self._adapters.owner_of(digest), self._clock.monotonic()
        self._scheduler.loaded(digest, owner, round(brought.load_ms), now, from_store=brought.from_store)

    async def _expel(self) -> None:
        with contextlib.suppress(EngineDead):
            await self._adapters.expel(self._runs.digests)
        self._changing = False
        self._wake()
