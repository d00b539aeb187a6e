"""Figures, their aims, and the arithmetic between a measurement and a line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

MIDDLE = (0.2, 0.8)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, and what the same measurement gave for the peer."""

    name: str
    value: float
    unit: str
    peer: float

    @property
    def line(self) -> str:
        return f"{self.name} {self.value:.4g} {self.unit} {self.peer:.4g}"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a figure should be. Where both bounds are None there is none."""

    at_least: float | None = None
    at_most: float | None = None

    def missed_by(self, figure: Figure) -> str | None:
        if self.at_least is not None and figure.value < self.at_least:
            return f"{figure.name} is {figure.value:.4g} {figure.unit}, aimed at no less than {self.at_least:g}"
        if self.at_most is not None and figure.value > self.at_most:
            return f"{figure.name} is {figure.value:.4g} {figure.unit}, aimed at no more than {self.at_most:g}"
        return None


NO_AIM = Aim()
# Every figure there is, by the section that measures it.
SECTIONS: dict[str, dict[str, Aim]] = {
    "router": {"router_ratio": Aim(at_least=0.4), "router_jobs_per_s": NO_AIM},
    "ledger": {"ledger_ratio": Aim(at_least=0.8), "ledger_admissions_per_s": NO_AIM, "ledger_same_way_ratio": NO_AIM},
    "eviction": {
        "eviction_cold_loads": NO_AIM,
        "eviction_cold_loads_belady": NO_AIM,
        "eviction_cold_loads_shares": NO_AIM,
        "eviction_cold_loads_no_shares": NO_AIM,
    },
    "pipeline": {
        "ttft_added_ms_p50": Aim(at_most=30),
        "ttft_added_ms_p99": Aim(at_most=80),
        "pipeline_throughput_ratio": Aim(at_least=0.95),
        "pipeline_tokens_per_s": NO_AIM,
    },
    "burst": {"burst_p99_ratio": Aim(at_most=1.5), "burst_first_token_p99_ratio": NO_AIM},
    "versions": {
        "versions_foreign_evictions": Aim(at_most=0),
        "versions_foreign_loads": Aim(at_most=0),
        "versions_loads_per_minute": Aim(at_most=20),
    },
    # Over its bound: quantum, longest decode in the draining slot, load and prefill, as measured in the same run.
    "cold": {"cold_first_token_s": NO_AIM, "cold_over_bound_s": Aim(at_most=2.0)},
    "real": {"real_ttft_added_ms_p50": NO_AIM, "real_throughput_ratio": NO_AIM, "real_tokens_per_s": NO_AIM},
}
AIMS = {name: aim for figures in SECTIONS.values() for name, aim in figures.items()}


def missed(figures: Iterable[Figure]) -> list[str]:
    """One sentence for each figure that misses its aim."""
    return [sentence for figure in figures if (sentence := AIMS[figure.name].missed_by(figure)) is not None]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def middle_rate(events: Iterable[tuple[float, int]]) -> float:
    """Tokens per second in the middle of a run, where neither its start nor its end weighs. Events are (time, tokens).

    The tokens of the first moment are those of the time before it and do not count.
    """
    ordered = sorted(events)
    total, seen = sum(tokens for _, tokens in ordered), 0
    inside: list[tuple[float, int]] = []
    for at_s, tokens in ordered:
        seen += tokens
        if MIDDLE[0] * total <= seen <= MIDDLE[1] * total:
            inside.append((at_s, tokens))
    first_s, last_s = inside[0][0], inside[-1][0]
    return sum(tokens for at_s, tokens in inside if at_s > first_s) / (last_s - first_s)
