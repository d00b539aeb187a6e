"""Named steps at which a crash test ends the process, as a power cut would.

`SWITCHYARD_FAILPOINT=routed` kills it the first time it reaches that step, `routed@3` the third time.
"""

import os
import signal
from collections.abc import Mapping
from typing import Final, Self

VARIABLE: Final = "SWITCHYARD_FAILPOINT"


class Failpoints:
    """One armed step, or none. The process holds one of these and passes it to what has steps."""

    def __init__(self, step: str | None = None, times: int = 1) -> None:
        self._step = step
        self._times_left = times

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises ValueError when the number of times is none."""
        step, _, times = environ.get(VARIABLE, "").partition("@")
        return cls(step or None, int(times or 1))

    def reach(self, step: str) -> None:
        """Go on, or end here without any clean-up."""
        if step != self._step:
            return
        self._times_left -= 1
        if self._times_left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
