"""Which offsets above the committed one are finished: the completion map that travels in the commit's metadata."""

# Kafka's default bound for commit metadata (offset.metadata.max.bytes).
MAP_BYTES_MAX = 4096


class Completions:
    """The committed offset of one partition, and the finished offsets above it.

    Every record read is shown to `read`, in order; whatever was read and is not running is finished. Offsets that
    hold no record (transaction markers) are passed with the next one that does.
    """

    def __init__(self, watermark: int, finished: set[int] | None = None) -> None:
        self._finished = finished or set()
        self._running: set[int] = set()
        self._next = watermark

    def read(self, offset: int) -> bool:
        """Take note of a record. False when a former owner finished it already, or it is in hand."""
        self._next = max(self._next, offset + 1)
        if offset in self._finished or offset in self._running:
            return False
        self._running.add(offset)
        return True

    def finish(self, offset: int) -> None:
        self._running.discard(offset)
        self._finished.add(offset)

    @property
    def watermark(self) -> int:
        """Everything below is finished: the offset to commit."""
        floor = min(self._running, default=self._next)
        self._finished = {offset for offset in self._finished if offset >= floor}
        return floor

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    def encode(self) -> str:
        """`first-last` ranges relative to the watermark. What does not fit is left out: it would run into the
        ledger's `ended` and be passed over, so a short map costs time, never a second execution."""
        floor = self.watermark
        text = ""
        for first, last in _ranges(sorted(self._finished)):
            part = f"{first - floor}-{last - floor}"
            joined = f"{text},{part}" if text else part
            if len(joined) > MAP_BYTES_MAX:
                break
            text = joined
        return text


def decode(watermark: int, text: str) -> Completions:
    """The map of a commit. Raises ValueError when it is not one of ours."""
    finished: set[int] = set()
    for part in text.split(",") if text else []:
        first, last = (int(number) for number in part.split("-"))
        if not 0 <= first <= last:
            raise ValueError(f"not a range: {part!r}")
        finished.update(range(watermark + first, watermark + last + 1))
    return Completions(watermark, finished)


def _ranges(offsets: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges
