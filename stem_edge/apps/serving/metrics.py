"""Counts of all answers, in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stem_edge.apps.serving.compute import Compute
from stem_edge.apps.serving.reply import Reply
from stem_edge.system.memory import own_memory

FIRST_TOKEN_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
# Field of RowCounters -> what it counts.
ROWS = {
    "hits": "tokens whose rows were in the row cache",
    "misses": "records that were not in the row cache",
    "bytes_read": "bytes read from flash",
    "stall_seconds": "seconds that steps waited for rows",
    "network_bytes": "bytes read from tables that are elsewhere",
    "network_reads": "requests for them",
}


class Metrics(Collector):
    """Counts what becomes of answers; in a registry of its own, so that several can be in a process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        given: dict[str, Any] = {"namespace": "stem_edge", "registry": self._registry}
        self._prompt = Counter("prompt_tokens", "Tokens of prompts that were answered", **given)
        self._cached = Counter("cached_tokens", "Of these, found in kept prompts", **given)
        self._new = Counter("new_tokens", "Tokens of answers", **given)
        self._outcomes = Counter("requests", "Answers by their end", ["outcome"], **given)
        first, each = (
            "From the arrival of a request to its first token",
            "Between tokens of an answer",
        )
        self._first = Histogram("first_token_seconds", first, buckets=FIRST_TOKEN_SECONDS, **given)
        self._each = Histogram("token_seconds", each, buckets=TOKEN_SECONDS, **given)

    def ended(self, reply: Reply) -> None:
        """Count an answer that has ended, from any thread."""
        self._outcomes.labels(reply.outcome or "cancelled").inc()
        request = reply.request
        if request.new_tokens:
            self._prompt.inc(request.prompt_tokens)
            self._cached.inc(request.cached_tokens)
            self._new.inc(request.new_tokens)
        if reply.first_at:
            self._first.observe(reply.first_at - reply.submitted)
        if request.new_tokens > 1:
            self._each.observe(request.decode_seconds / (request.new_tokens - 1))

    def watch(self, compute: Compute) -> None:
        """Show the state of the compute thread, too."""
        self._compute = compute
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all figures, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield figures that are read when they are asked for."""
        compute = self._compute
        yield GaugeMetricFamily(
            "stem_edge_running", "Answers under way", max(0, compute.busy - compute.queued)
        )
        yield GaugeMetricFamily("stem_edge_queued", "Requests that wait", compute.queued)
        loaded = compute.loaded is not None
        yield GaugeMetricFamily("stem_edge_loaded", "Whether it is loaded", int(loaded))
        if loaded:
            for name, what in ROWS.items():
                count = getattr(compute.counters, name)
                yield CounterMetricFamily(f"stem_edge_row_{name}", what.capitalize(), count)
            what = "Bytes of anonymous memory that the model's plan and requests may take"
            yield GaugeMetricFamily("stem_edge_memory_limit_bytes", what, compute.memory_limit)
            taken = "Bytes of anonymous memory that the process takes"
            yield GaugeMetricFamily("stem_edge_memory_bytes", taken, own_memory())

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that nothing is collected when it is registered."""
        return iter(())
