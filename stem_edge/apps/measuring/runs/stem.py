"""A loaded bundle for measurements: a prompt, then one token of a real text at a time."""

from __future__ import annotations

from typing import Any

from stem_edge.bundle.footprint import footprint_of
from stem_edge.graph.names import PREFILL
from stem_edge.runtime.backends.costs import PREFILL_FROM
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with


class StemEdge:
    """A loaded bundle to measure on a real text: repetitive answers would need fewer rows."""

    def __init__(self, path: str, context: int, threads: int, **options: Any) -> None:
        given = LoadOptions(context_length=context, threads=threads, **options)
        self._model = load_with(path, given)
        self._engine, self._length = self._model.engine, context
        self._context = self._engine.open_context(1)
        # Open the prefill graph now, so that this counts as loading and not as prompt time.
        if (loaded := getattr(self._engine.backend, "loaded", None)) is not None:
            loaded.later.find(PREFILL)

    def clear(self) -> None:
        """Empty the KV cache."""
        self._context = self._engine.open_context(self._length)

    def choose(self, token_ids: list[int]) -> int:
        """Process a prompt in chunks, or one token, and return the most probable next token."""
        steps, prefill = self._engine.steps(token_ids), len(token_ids) >= PREFILL_FROM
        self._engine.expect(steps[0])
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            logits = self._engine.step([self._context], step, after, prefill=prefill)
        return int(logits[0].argmax())

    def counters(self) -> dict[str, float]:
        """Return row counters, and sizes of memory plan, row cache and KV cache in bytes."""
        plan, rows = self._model.plan, self._engine.rows
        filled = 0 if (cache := getattr(rows, "cache", None)) is None else cache.filled
        slot_nbytes = footprint_of(self._model.bundle.manifest).slot_nbytes
        return {
            **vars(rows.counters()),
            "planned": plan.total,
            "slots": plan.slots,
            "row_cache_nbytes": filled * slot_nbytes,
            "kv_nbytes": self._context.nbytes,
        }
