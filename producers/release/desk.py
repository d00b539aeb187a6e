"""The release engineer's desk: the registry view, the doors to append through, and the keys to sign with."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from infra.clock import Clock
from infra.kafka.publisher import AuditWriter, Publisher
from infra.kafka.records import Incoming
from infra.kafka.tail import Tail
from infra.objects import Objects, open_objects
from infra.settings import KeySettings, StackFile
from ledger.registry import AdapterEntry, Registry
from schemas.adapters import BaseAdded
from schemas.audit import AuditRecord
from schemas.errors import SwitchyardError
from schemas.ids import is_digest, parse_digest, parse_tenant
from schemas.record import Record
from schemas.tenants import TenantConfigured, TenantState
from schemas.topics import KEYS, POOLS, REGISTRY, TENANTS, Role

# The broker has acknowledged the record; our own view of it follows within a fetch.
SEEN_SECONDS_MAX = 20.0
OPERATOR_TOPICS = frozenset({KEYS.name, POOLS.name, TENANTS.name})


class Unknown(SwitchyardError):
    """The registry knows nothing of this name."""


class ViewBehind(SwitchyardError):
    """The record was appended, but the registry view did not show it in time."""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What the functions of this room touch the world with. `actor` is recorded as who did it."""

    registry: Registry
    view: Tail
    release: Publisher
    operator: Publisher
    objects: Objects
    keys: KeySettings
    actor: str

    async def append(self, topic: str, key: str, record: Record) -> None:
        """Append one record as the role that may, and wait until the registry view shows it."""
        publisher = self.operator if topic in OPERATOR_TOPICS else self.release
        where = await publisher.publish(topic, key, record, subject=key if is_digest(key) else None)
        await self.wait(lambda: self.registry.positions.get(topic, 0) > where.offset, SEEN_SECONDS_MAX)

    async def record(self, key: str, record: AuditRecord) -> None:
        """Append one record to the audit as the operator, in a writer's life of its own that is closed behind it."""
        audit = AuditWriter(self.operator, f"operator-{secrets.token_hex(4)}")
        await audit.start()
        await audit.append(key, record)
        await audit.close()

    async def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for what the view will show. Raises ViewBehind."""
        if not await self.view.wait_until(condition, seconds):
            raise ViewBehind

    def adapter(self, digest: str) -> AdapterEntry:
        entry = self.registry.adapters.get(parse_digest(digest))
        if entry is None or entry.manifest is None:
            raise Unknown(f"the registry has no adapter {digest}")
        return entry

    def base(self, name: str) -> BaseAdded:
        """A base by name or by digest."""
        found = [base for digest, base in self.registry.bases.items() if name in (digest, base.manifest.name)]
        if not found:
            raise Unknown(f"the registry has no base {name[:90]!r}; add one with: switchyard base add DIR --name NAME")
        if len(found) > 1:
            raise Unknown(f"{len(found)} bases are named {name!r}; name the digest of one")
        return found[0]

    def tenant(self, name: str) -> TenantConfigured:
        tenant = self.registry.tenants.get(parse_tenant(name))
        if tenant is None or tenant.state is not TenantState.ACTIVE:
            raise Unknown(f"there is no tenant {name!r}; add it with: switchyard tenant add {name}")
        return tenant


@contextlib.asynccontextmanager
async def open_desk(stack: StackFile, clock: Clock, actor: str) -> AsyncIterator[Desk]:
    """Connect to a running stack and fold its registry to the end."""
    life = secrets.token_hex(4)
    registry = Registry()
    view = Tail(stack.kafka(Role.RELEASE), [topic.name for topic in REGISTRY], _fold_into(registry), clock)
    release = Publisher(stack.kafka(Role.RELEASE), f"release-{life}", clock)
    operator = Publisher(stack.kafka(Role.OPERATOR), f"operator-{life}", clock)
    async with contextlib.AsyncExitStack() as opened:
        for part in (view, release, operator):
            opened.push_async_callback(part.stop)
            await part.start()
        following = asyncio.create_task(view.run())
        opened.push_async_callback(_end, following)
        yield Desk(
            registry=registry,
            view=view,
            release=release,
            operator=operator,
            objects=open_objects(stack.objects),
            keys=stack.keys,
            actor=actor,
        )


def _fold_into(registry: Registry) -> Callable[[Incoming], None]:
    def apply(record: Incoming) -> None:
        registry.apply(record.topic, record.offset, record.value)

    return apply


async def _end(following: "asyncio.Task[None]") -> None:
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
