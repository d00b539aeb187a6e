"""Time, as an argument: the wall for records, the monotonic for waits."""

import time
from typing import Protocol


class Clock(Protocol):
    """What reads the time. Tests pass one that they move."""

    def now_ms(self) -> int:
        """Milliseconds of the wall clock since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""
        ...


class SystemClock:
    """This machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()
