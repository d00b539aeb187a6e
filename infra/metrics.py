"""Every metric, named and explained once, and the small HTTP server that shows them.

Labels are bounded: a value that is not listed here is counted as `other`. No tenant, job or digest is a label.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

OTHER: Final = "other"
CLASSES: Final = ("interactive", "batch")
OUTCOMES: Final = ("completed", "failed", "rejected", "cancelled", "expired", "interrupted", "revoked")
REJECT_REASONS: Final = (
    "invalid_record", "unknown_alias", "limit_exceeded", "deadline_passed", "job_id_reused", "cancelled",
    "tenant_mismatch", "class_not_granted", "impersonation", "capacity", "concurrency", "rate", "budget", "not_ready",
)  # fmt: skip
LEDGER_CALLS: Final = ("admit", "begin", "cancel", "settle", "window")
MEMORY_PARTS: Final = (
    "base_weights", "slots", "slots_used", "host_cache", "staging", "workspace", "kv_cache", "fragmentation",
    "process", "limit",
)  # fmt: skip
SECONDS_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

CounterName = Literal[
    "records_consumed", "records_dead_lettered", "jobs_decided", "jobs_rejected", "jobs_finished", "jobs_interrupted",
    "routes_refused", "tokens_generated", "chunks_sent", "adapter_loads", "adapter_evictions",
    "usage_settled", "loop_failures",
]  # fmt: skip
GaugeName = Literal[
    "registry_stale_seconds", "partitions_owned", "partitions_paused", "jobs_queued", "jobs_running",
    "adapters_resident", "adapters_in_host", "memory_bytes", "memory_rows", "adapter_bytes_error",
    "ledger_open", "fairness_jain", "fairness_gap",
]  # fmt: skip
HistogramName = Literal[
    "ledger_call_seconds", "transaction_seconds", "decision_seconds", "first_token_seconds", "adapter_load_seconds",
]  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """What one metric counts, and the values its labels may take."""

    help: str
    labels: dict[str, tuple[str, ...]]


COUNTERS: Final[dict[CounterName, Metric]] = {
    "records_consumed": Metric("Records taken from Kafka.", {}),
    "records_dead_lettered": Metric("Records that were refused and kept in the dead letters.", {}),
    "jobs_decided": Metric(
        "What the router answered to jobs.",
        {"job_class": CLASSES, "answer": ("admitted", "rejected", "full", "wait", "repeated", "cancelled")},
    ),
    "jobs_rejected": Metric("Refusals the router answered.", {"reason": REJECT_REASONS}),
    "jobs_finished": Metric("Outcomes written by a worker.", {"outcome": OUTCOMES}),
    "jobs_interrupted": Metric("Executions ended without an outcome, to be taken up by another worker.", {}),
    "routes_refused": Metric(
        "Routes a worker did not execute.",
        {"reason": ("signature", "key", "body", "base", "partition", "expired", "revoked", "copy", "unknown_lease")},
    ),
    "tokens_generated": Metric("Tokens the engine produced.", {}),
    "chunks_sent": Metric("Chunks appended to stream topics.", {}),
    "adapter_loads": Metric("Adapters loaded into the engine.", {"result": ("loaded", "failed", "quarantined")}),
    "adapter_evictions": Metric(
        "Adapters taken out of the engine.",
        {"reason": ("own_share", "reclaim_borrowed", "turn", "idle", "memory", "revoked", "failed", "shutdown")},
    ),
    "usage_settled": Metric("Leases ended by the settler.", {"outcome": OUTCOMES}),
    "loop_failures": Metric("Failures after which a loop began anew.", {}),
}
GAUGES: Final[dict[GaugeName, Metric]] = {
    "registry_stale_seconds": Metric("How long ago the registry view was last known to be complete.", {}),
    "partitions_owned": Metric("Partitions this process owns.", {}),
    "partitions_paused": Metric("Owned partitions that wait for room.", {}),
    "jobs_queued": Metric("Admitted jobs waiting in this worker.", {}),
    "jobs_running": Metric("Jobs in the engine.", {}),
    "adapters_resident": Metric("Adapters in the engine's slots.", {}),
    "adapters_in_host": Metric("Copies of adapters in the engine's host memory.", {}),
    "memory_bytes": Metric("Where the engine's memory is.", {"part": MEMORY_PARTS}),
    "memory_rows": Metric("Rows that the memory allows now.", {}),
    "adapter_bytes_error": Metric("Measured over predicted bytes of the last adapter, less 1.", {}),
    "ledger_open": Metric("1 while the ledger admits jobs.", {}),
    "fairness_jain": Metric("Jain's index of the fairness counters of the last minute's tenants.", {}),
    "fairness_gap": Metric("The largest difference between two of these counters.", {}),
}
HISTOGRAMS: Final[dict[HistogramName, Metric]] = {
    "ledger_call_seconds": Metric("Time of one ledger call.", {"call": LEDGER_CALLS}),
    "transaction_seconds": Metric("Time of one Kafka transaction, begin to commit.", {}),
    "decision_seconds": Metric("From a job's append to its route's append.", {"job_class": CLASSES}),
    "first_token_seconds": Metric("From a job's append to the append of its first token.", {"job_class": CLASSES}),
    "adapter_load_seconds": Metric("From the fetch of an adapter to its place in the engine.", {}),
}


class Metrics:
    """The metrics of one process. An unknown name is a type error; labels are the ones declared above."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counters = {name: Counter(*self._named(name, metric)) for name, metric in COUNTERS.items()}
        self._gauges = {name: Gauge(*self._named(name, metric)) for name, metric in GAUGES.items()}
        self._histograms = {
            name: Histogram(*self._named(name, metric), buckets=SECONDS_BUCKETS) for name, metric in HISTOGRAMS.items()
        }

    def _named(self, name: str, metric: Metric) -> tuple[str, str, tuple[str, ...], str, str, str, CollectorRegistry]:
        """The positional arguments that all three kinds share: namespace, subsystem and unit come after the labels."""
        return f"switchyard_{name}", metric.help, tuple(metric.labels), "", "", "", self.registry

    def count(self, name: CounterName, by: float = 1, **labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(**_bounded(COUNTERS[name], labels)) if labels else counter).inc(by)

    def set(self, name: GaugeName, value: float, **labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(**_bounded(GAUGES[name], labels)) if labels else gauge).set(value)

    def observe(self, name: HistogramName, seconds: float, **labels: str) -> None:
        histogram = self._histograms[name]
        (histogram.labels(**_bounded(HISTOGRAMS[name], labels)) if labels else histogram).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _bounded(metric: Metric, labels: dict[str, str]) -> dict[str, str]:
    return {name: value if value in metric.labels[name] else OTHER for name, value in labels.items()}


class StatusServer:
    """Serves /metrics, /live and /ready of one process from a thread of its own.

    `not_ready` is called from that thread: it returns None, or one sentence that says what is awaited.
    """

    def __init__(
        self, metrics: Metrics, not_ready: Callable[[], str | None], port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self._server = ThreadingHTTPServer((host, port), _handler(metrics, not_ready))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(metrics: Metrics, not_ready: Callable[[], str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(HTTPStatus.OK, metrics.text(), CONTENT_TYPE_LATEST)
            elif self.path == "/live":
                self._answer(HTTPStatus.OK, b"live\n")
            elif self.path == "/ready":
                awaited = not_ready()
                status = HTTPStatus.OK if awaited is None else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(status, f"{awaited or 'ready'}\n".encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /live and /ready are served\n")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """A scrape is no event."""

    return Handler
