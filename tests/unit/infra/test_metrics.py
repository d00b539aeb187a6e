"""Metrics are bounded, explained, and served with liveness and readiness."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from infra.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics, StatusServer


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def awaited() -> list[str]:
    """What the process waits for; empty: ready."""
    return []


@pytest.fixture
def server(metrics: Metrics, awaited: list[str]) -> Iterator[StatusServer]:
    running = StatusServer(metrics, lambda: awaited[0] if awaited else None)
    yield running
    running.close()


def get(server: StatusServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_counts_and_times_are_served(metrics: Metrics, server: StatusServer) -> None:
    metrics.count("jobs_decided", job_class="batch", answer="admitted")
    metrics.set("jobs_running", 3)
    metrics.observe("ledger_call_seconds", 0.003, call="admit")

    status, text = get(server, "/metrics")

    assert status == 200
    assert 'switchyard_jobs_decided_total{answer="admitted",job_class="batch"} 1.0' in text
    assert "switchyard_jobs_running 3.0" in text
    assert 'switchyard_ledger_call_seconds_bucket{call="admit",le="0.005"} 1.0' in text


def test_a_label_value_that_is_not_declared_is_counted_as_other(metrics: Metrics) -> None:
    for number in range(50):
        metrics.count("jobs_decided", job_class="batch", answer=f"acme-{number}")

    assert b"acme" not in metrics.text()
    assert b'switchyard_jobs_decided_total{answer="other",job_class="batch"} 50.0' in metrics.text()


def test_no_label_is_a_tenant_a_job_or_a_digest() -> None:
    labels = {label for kind in (COUNTERS, GAUGES, HISTOGRAMS) for metric in kind.values() for label in metric.labels}

    assert labels <= {"answer", "call", "job_class", "outcome", "part", "reason", "result"}


def test_every_metric_is_explained_in_a_sentence() -> None:
    for kind in (COUNTERS, GAUGES, HISTOGRAMS):
        assert all(metric.help.endswith(".") for metric in kind.values())


def test_readiness_says_what_is_awaited_and_liveness_does_not_care(server: StatusServer, awaited: list[str]) -> None:
    awaited.append("waiting for the registry")

    assert get(server, "/ready") == (503, "waiting for the registry\n")
    assert get(server, "/live") == (200, "live\n")
    awaited.clear()
    assert get(server, "/ready") == (200, "ready\n")


def test_other_paths_are_not_there(server: StatusServer) -> None:
    assert get(server, "/../etc/passwd")[0] == 404
