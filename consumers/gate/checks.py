"""What the gate judges an adapter by. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.adapters import GateReport
from schemas.jobs import Message

# Fixed questions, so that two runs of the gate on one build ask the same.
QUESTIONS = (
    "How do I return a parcel?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Can you help me with a contract?",
)
ANSWER_TOKENS = 16

Answer = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What happened when an adapter was tried: its answers and the zero adapter's, token by token, or a problem."""

    load_ms: int = 0
    resident_bytes: int = 0
    answers: Sequence[Answer] = ()
    base_answers: Sequence[Answer] = ()
    problems: tuple[str, ...] = ()


def questions() -> list[tuple[Message, ...]]:
    return [(Message(role="user", content=text),) for text in QUESTIONS]


def judge(adapter: str, engine: str, trial: Trial) -> GateReport:
    """The report on a trial: it passes when it ran without a problem and answered otherwise than the base."""
    pairs = list(zip(trial.answers, trial.base_answers, strict=True))
    differing = sum(own != base for own, base in pairs)
    problems = list(trial.problems)
    if not problems and not differing:
        problems.append(
            f"no effect: it loads, but answers all {len(pairs)} questions exactly like the base; "
            "were its weights trained, and for these modules?"
        )
    return GateReport(
        adapter=adapter,
        engine=engine,
        passed=not problems,
        load_ms=trial.load_ms,
        resident_bytes=trial.resident_bytes,
        prompts=len(QUESTIONS),
        differing=differing,
        problems=tuple(problems),
    )
