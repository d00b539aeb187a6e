"""Kills process groups once its parent is gone: `python reaper.py` with lines `+GROUP` and `-GROUP` on its input.

The guard ends a launcher's own children; this ends their children too.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
