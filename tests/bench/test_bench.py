"""The bench measures and prints lines that a program can read. What it measures is nobody's business here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.figures import AIMS, SECTIONS, Figure, middle_rate, missed, quantile

LINE = re.compile(r"[a-z0-9_]+ -?[0-9.e+-]+ (ratio|jobs/s|calls/s|loads|evictions|ms|tokens/s) -?[0-9.e+-]+")


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_quick_run_prints_one_line_per_figure(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in lines), lines
    expected = [
        *SECTIONS["router"],
        *SECTIONS["ledger"],
        *SECTIONS["eviction"],
        *SECTIONS["pipeline"],
        *SECTIONS["burst"],
        *SECTIONS["versions"],
    ]
    assert [line.split()[0] for line in lines] == expected
    assert [figure["name"] for figure in json.loads(file.read_text())] == expected


def test_a_figure_that_misses_its_aim_is_named() -> None:
    good = Figure(name="router_ratio", value=0.41, unit="ratio", peer=1.0)
    slow = Figure(name="ttft_added_ms_p99", value=80.5, unit="ms", peer=50.0)
    unaimed = Figure(name="real_throughput_ratio", value=0.1, unit="ratio", peer=1.0)
    assert missed([good, slow, unaimed]) == ["ttft_added_ms_p99 is 80.5 ms, aimed at no more than 80"]
    assert good.name in AIMS


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert quantile(list(range(1, 301)), 0.99) == 297


def test_the_rate_is_taken_where_neither_start_nor_end_weighs() -> None:
    steady = [(10.0 + step, 5) for step in range(100)]
    assert middle_rate([*steady, (0.0, 5), (200.0, 5)]) == pytest.approx(5.0)
