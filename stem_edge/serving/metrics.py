"""Figures of all answers, in the form of Prometheus, and of one, as it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stem_edge.bundle.manifest import TABLES
from stem_edge.runtime.model import Model
from stem_edge.serving.budget import memory_limit
from stem_edge.serving.compute import Compute
from stem_edge.serving.reply import Reply
from stem_edge.system.memory import own_memory
from stem_edge.system.process_memory import FileKinds, open_reader
from stem_edge.system.user_folder import cache_folder

FIRST_TOKEN_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
# Field of RowCounters -> what it counts.
ROWS = {
    "hits": "tokens whose rows were in the row cache",
    "misses": "records that were not in the row cache",
    "bytes_read": "bytes read from flash",
    "stall_seconds": "seconds that steps waited for rows",
    "uploaded_bytes": "bytes copied to a device",
    "network_bytes": "bytes read from tables that are elsewhere",
    "network_reads": "requests for them",
}


class Metrics:
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
        if request.prompt_computed:
            self._prompt.inc(request.prompt_tokens)
            self._cached.inc(request.cached_tokens)
            self._new.inc(request.new_tokens)
        if reply.first_at:
            self._first.observe(reply.first_at - reply.submitted)
        if request.new_tokens > 1:
            self._each.observe(request.decode_seconds / (request.new_tokens - 1))

    def watch(self, compute: Compute) -> None:
        """Show the state of the compute thread, too."""
        self._registry.register(_State(compute))

    def text(self) -> bytes:
        """Return all figures, as Prometheus reads them."""
        return generate_latest(self._registry)


class _State(Collector):
    """Figures that are read when they are asked for."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def collect(self) -> Iterator[Metric]:
        compute = self._compute
        yield GaugeMetricFamily("stem_edge_running", "Answers under way", compute.running)
        yield GaugeMetricFamily("stem_edge_queued", "Requests that wait", compute.queued)
        model = compute.loaded
        yield GaugeMetricFamily("stem_edge_loaded", "Whether it is loaded", int(model is not None))
        if model is not None:
            yield from _rows(model)
            yield from _memory(model)

    def describe(self) -> Iterator[Metric]:
        return iter(())  # so that nothing is collected when it is registered


def _rows(model: Model) -> Iterator[Metric]:
    counters = asdict(model.engine.rows.counters())
    for name, what in ROWS.items():
        yield CounterMetricFamily(f"stem_edge_row_{name}", what.capitalize(), counters[name])


def _memory(model: Model) -> Iterator[Metric]:
    limit = "Bytes of anonymous memory that the model's plan and requests may take"
    yield GaugeMetricFamily("stem_edge_memory_limit_bytes", limit, memory_limit(model))
    kinds = "Resident bytes of this process by kind, and swap"
    family = GaugeMetricFamily("stem_edge_memory_bytes", kinds, labels=["kind"])
    for kind, nbytes in _read_memory(model)().items():
        family.add_metric([kind], nbytes)
    yield family


def _read_memory(model: Model) -> Callable[[], dict[str, int]]:
    folder = model.bundle.path
    files = FileKinds(folder / TABLES, (folder, cache_folder(None)))
    reader = open_reader(os.getpid(), files)
    return lambda: reader.memory().kinds()


def timings(model: Model, reply: Reply) -> dict[str, float]:
    """Return the figures of an answer so far: times in milliseconds, sizes in bytes.

    Rows and flash are those of all answers since this one was asked for.
    """
    request = reply.request
    computed = request.prompt_tokens - request.cached_tokens
    rows, before = model.engine.rows.counters(), reply.counters
    return {
        "prompt_n": computed,
        "cache_n": request.cached_tokens,
        "prompt_ms": request.prompt_seconds * 1e3,
        "prompt_per_second": _rate(computed, request.prompt_seconds),
        "predicted_n": request.new_tokens,
        "predicted_ms": request.decode_seconds * 1e3,
        "predicted_per_second": _rate(request.new_tokens - 1, request.decode_seconds),
        "row_hits": rows.hits - before.hits,
        "row_misses": rows.misses - before.misses,
        "flash_bytes": rows.bytes_read - before.bytes_read,
        "memory_bytes": own_memory(),
        "memory_limit": memory_limit(model),
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
