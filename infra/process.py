"""What every process of ours is around its work: logs, metrics with readiness, and a stop that SIGTERM asks for."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from infra import logs
from infra.clock import Clock, SystemClock
from infra.metrics import Metrics, StatusServer
from infra.settings import BadSettings, ProcessSettings, read

FAILED = 1


@dataclass(kw_only=True)
class Process:
    """A running process, as its work sees it."""

    name: str
    settings: ProcessSettings
    clock: Clock
    metrics: Metrics
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    # None, or one sentence that says what is awaited; asked from the status server's thread.
    not_ready: Callable[[], str | None] = lambda: "starting"

    def awaited(self) -> str | None:
        """What readiness waits for now."""
        return self.not_ready()


def run(work: Callable[[Process], Awaitable[None]]) -> int:
    """Run a process's work to its end and return the exit code. The work watches `stopping`.

    This is the one place that catches everything: what nobody could mend is logged once and ends the process.
    """
    try:
        settings = read(ProcessSettings)
    except BadSettings as error:
        logs.configure("switchyard")
        logs.ActionLog("process").error("process.misconfigured", detail=str(error))
        return FAILED
    logs.configure(settings.name)
    log = logs.ActionLog("process")
    try:
        asyncio.run(_run(settings, work))
    except Exception as error:  # noqa: BLE001 - a process's main: logged once, then it ends
        for cause in leaves(error):
            log.error("process.failed", cause=cause, detail=str(cause))
        return FAILED
    log.info("process.ended")
    return 0


def apply_environment(variables: Mapping[str, str]) -> None:
    """Set what libraries read only from the environment. What is set already stands."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside an error group: what went wrong, without the tree of tasks around it."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


async def _run(settings: ProcessSettings, work: Callable[[Process], Awaitable[None]]) -> None:
    process = Process(name=settings.name, settings=settings, clock=SystemClock(), metrics=Metrics())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stopping.set)
    server = StatusServer(process.metrics, process.awaited, settings.metrics_port)
    try:
        await work(process)
    finally:
        server.close()
