"""Figures of one answer, as it comes."""

from __future__ import annotations

from stem_edge.runtime.model import Model
from stem_edge.serving.budget import memory_limit
from stem_edge.serving.reply import Reply
from stem_edge.system.memory import own_memory


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
