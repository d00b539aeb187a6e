"""What a reader is given of one job while it runs: the chunks of the highest attempt, in order, then the final text."""

from dataclasses import dataclass

from schemas.record import RECORD_BYTES_MAX
from schemas.replies import TokensGenerated

# A slow reader's text is kept joined, up to this; what is beyond comes with the final reply.
TEXT_CHARACTERS_MAX = RECORD_BYTES_MAX


@dataclass(frozen=True)
class Token:
    """The next piece of text. A slow reader gets several chunks as one."""

    text: str
    attempt: int


@dataclass(frozen=True)
class Reset:
    """The text given so far is void: what follows begins anew, usually in a higher attempt."""

    attempt: int


@dataclass(frozen=True)
class Waiting:
    """The job waits, and for what: in its topic, or to be sent again after a refusal for want of a place."""

    message: str


Event = Token | Reset | Waiting


class Preview:
    """Chunks in, events out. A lower attempt and a repeated chunk are dropped; after a gap the final text fills in."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._seq = 0
        self._text = ""
        self._given = 0
        self._reset_due = False
        self._notices: list[Waiting] = []

    def wait(self, message: str) -> None:
        if Waiting(message) not in self._notices:
            self._notices.append(Waiting(message))

    def take(self, chunk: TokensGenerated) -> None:
        if self._attempt is None or chunk.attempt > self._attempt:
            self._begin(chunk.attempt)
        if chunk.attempt != self._attempt or chunk.seq != self._seq:
            return
        if len(self._text) + len(chunk.text) > TEXT_CHARACTERS_MAX:
            return
        self._seq += 1
        self._text += chunk.text

    def finish(self, text: str, attempt: int) -> None:
        """The final reply's text is the truth: give what is missing, or begin anew where something else was given."""
        if self._reset_due or not text.startswith(self._text[: self._given]):
            self._begin(attempt)
        self._attempt = attempt
        self._text = text

    def drain(self) -> tuple[Event, ...]:
        """What the reader has not been given yet: notices, at most a reset, and one piece of text."""
        attempt = self._attempt or 0
        events: list[Event] = list(self._notices)
        self._notices.clear()
        if self._reset_due:
            events.append(Reset(attempt))
            self._reset_due = False
        if len(self._text) > self._given:
            events.append(Token(self._text[self._given :], attempt))
            self._given = len(self._text)
        return tuple(events)

    def _begin(self, attempt: int) -> None:
        self._reset_due = self._reset_due or self._given > 0
        self._attempt = attempt
        self._seq = self._given = 0
        self._text = ""
