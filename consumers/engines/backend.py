"""What differs between engines: everything below the table of slots and the streams."""

from collections.abc import Callable, Sequence
from typing import Protocol

from consumers.engines.memory import Memory, Sizes
from consumers.engines.protocol import Artifact, Delta, EngineError, EngineRequest
from consumers.engines.residents import Listed
from schemas.jobs import Message

Output = tuple[str, Delta | EngineError]
Outputs = list[Output]
# Both are called on the event loop.
Deliver = Callable[[Outputs], object]
Die = Callable[[str], object]


class Backend(Protocol):
    """Driven by `SlotEngine` alone, which bounds every wait. Any coroutine may raise whatever the library raises."""

    async def start(self, deliver: Deliver, die: Die) -> None:
        """Load the base; from here on call `deliver` with what requests produce and `die` when the engine is lost."""

    async def stop(self) -> None:
        """Free everything."""

    def stuck_s(self) -> float:
        """For how long there has been work and no progress."""

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """As `Engine.encode`."""

    async def stage(self, artifact: Artifact, int_id: int) -> Listed:
        """Copy an adapter into host memory; what there is now. May leave anything behind when it raises, as may
        `activate`: `remove` follows.
        """

    async def activate(self, int_id: int) -> Listed:
        """Copy what is in host memory under the id into a free slot; what there is now."""

    async def deactivate(self, int_id: int) -> Listed:
        """Free the slot, keep the copy, after every abort before it; what there is now."""

    async def remove(self, int_id: int) -> Listed:
        """Drop whatever there is under the id, half-loaded or whole, after every abort before it; what there is now."""

    async def listed(self) -> Listed:
        """What the engine itself believes it holds, half-loaded adapters included."""

    async def memory(self) -> Memory:
        """As `Engine.memory`, without what is set aside."""

    async def sizes(self) -> Sizes:
        """What adapters take, by module: asked once, after `start`."""

    async def reset_cache(self) -> None:
        """As `Engine.reset_cache`."""

    def submit(self, request: EngineRequest, int_id: int) -> None:
        """Start a request. Its end is delivered as a finish reason or an error."""

    def abort(self, request_id: str) -> None:
        """Forget a request; no error if it is unknown or over."""
