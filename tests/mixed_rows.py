"""Batches of jobs, each with a row that is cancelled, one late, one broken and one revoked, and what is said of it."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum

from infra.kafka.records import Incoming
from schemas.adapters import AdapterDrained
from schemas.errors import InvalidRecord
from schemas.jobs import Outcome
from schemas.metering import UsageRecorded
from schemas.record import decode_one_of
from schemas.replies import JobCompleted, JobFailed, TokensGenerated

ALIASES = ("a", "b")
# Prompts with the tokens that are asked for: rows of one batch end at different times.
ASKED = (("ba de fi", 12), ("go ku la me ni", 40), ("po ru sa", 90))
# No row that asks for this many lives to its end.
LONG = 1900
CONTEXT_MAX = 2048


class Fate(StrEnum):
    """What happens to a row."""

    WELL = "well"
    CANCELLED = "cancelled"
    LATE = "late"
    REVOKED = "revoked"
    REFUSED = "refused"
    UNCOUNTED = "uncounted"
    CORRUPTED = "corrupted"


BREAKS = (Fate.REFUSED, Fate.UNCOUNTED, Fate.CORRUPTED)
ENDS = {
    Fate.CANCELLED: (Outcome.CANCELLED, "cancelled"),
    Fate.LATE: (Outcome.EXPIRED, "deadline_passed"),
    Fate.REVOKED: (Outcome.REVOKED, "adapter_revoked"),
    Fate.REFUSED: (Outcome.FAILED, "prompt_invalid"),
    Fate.UNCOUNTED: (Outcome.FAILED, "prompt_tokens_exceeded"),
    Fate.CORRUPTED: (Outcome.FAILED, "engine_corrupted"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job of a batch, and what is to become of it."""

    fate: Fate
    tenant: str
    alias: str
    prompt: str
    tokens: int

    @property
    def asked(self) -> tuple[str, str, str, int]:
        return self.tenant, self.alias, self.prompt, self.tokens


def rows_of(number: int, tenants: list[str]) -> list[Row]:
    """Two rows that end well for each of four adapters, and among them, on the same and other adapters, four others."""
    pairs = [(tenant, alias) for tenant in tenants for alias in ALIASES]
    well = [
        Row(fate=Fate.WELL, tenant=tenant, alias=alias, prompt=prompt, tokens=tokens)
        for place, (tenant, alias) in enumerate(pairs * 2)
        for prompt, tokens in [ASKED[(number + place) % len(ASKED)]]
    ]
    broken = BREAKS[number % len(BREAKS)]
    others = [
        (Fate.CANCELLED, *pairs[number % 4], "ba de fi"),
        (Fate.LATE, *pairs[(number + 1) % 4], "po ru sa"),
        (Fate.REVOKED, tenants[number % 2], f"revoked-{number}", "ba de fi"),
        (
            broken,
            *((tenants[number % 2], f"corrupted-{number}") if broken is Fate.CORRUPTED else pairs[(number + 2) % 4]),
            "ba " * CONTEXT_MAX if broken is Fate.REFUSED else "ba de fi",
        ),
    ]
    odd = [Row(fate=fate, tenant=t, alias=alias, prompt=p, tokens=LONG) for fate, t, alias, p in others]
    return [row for four in zip(well[:4], odd, well[4:], strict=True) for row in four]


class Seen:
    """What the worker has said, by job."""

    def __init__(self) -> None:
        self.replies: defaultdict[str, list[JobCompleted | JobFailed]] = defaultdict(list)
        self.usage: defaultdict[str, list[UsageRecorded]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self.drained: dict[str, int] = {}

    def take(self, record: Incoming) -> None:
        kinds = (JobCompleted, JobFailed, UsageRecorded, TokensGenerated, AdapterDrained)
        try:
            said = decode_one_of(kinds, record.value)
        except InvalidRecord:
            return
        match said:
            case JobCompleted() | JobFailed():
                self.replies[said.job_id].append(said)
            case UsageRecorded():
                self.usage[said.job_id].append(said)
            case TokensGenerated():
                self.tokens[said.job_id] += said.tokens
            case AdapterDrained():
                self.drained[said.adapter] = said.aborted_jobs
