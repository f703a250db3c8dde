"""Counts of all answers, in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stem_edge.serving.compute import Compute
from stem_edge.serving.reply import Reply
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
        self._registry = registry = CollectorRegistry()
        self._prompt = Counter(
            "stem_edge_prompt_tokens", "Tokens of prompts that were answered", registry=registry
        )
        self._cached = Counter(
            "stem_edge_cached_tokens", "Of these, found in kept prompts", registry=registry
        )
        self._new = Counter("stem_edge_new_tokens", "Tokens of answers", registry=registry)
        self._outcomes = Counter(
            "stem_edge_requests", "Answers by their end", ["outcome"], registry=registry
        )
        self._first = Histogram(
            "stem_edge_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._each = Histogram(
            "stem_edge_token_seconds",
            "Between tokens of an answer, on average",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )

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
