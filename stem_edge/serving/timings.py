"""Figures of one answer, as it comes."""

from __future__ import annotations

from stem_edge.runtime.model import Model
from stem_edge.serving.reply import Reply
from stem_edge.system.memory import own_memory


def timings(model: Model, reply: Reply) -> dict[str, float]:
    """Return the figures of an answer so far: times in milliseconds, sizes in bytes.

    Rows and flash are those of all answers since this one was asked for.
    """
    computed = len(reply.request.prompt) - reply.request.cached
    prompt_seconds = max(0.0, (reply.first_at or reply.submitted) - reply.submitted)
    seconds = reply.last_at - reply.first_at
    rows, before = model.engine.rows.counters(), reply.counters
    return {
        "prompt_n": computed,
        "cache_n": reply.request.cached,
        "prompt_ms": prompt_seconds * 1e3,
        "prompt_per_second": computed / prompt_seconds if prompt_seconds else 0.0,
        "predicted_n": reply.tokens,
        "predicted_ms": seconds * 1e3,
        "predicted_per_second": (reply.tokens - 1) / seconds if seconds > 0 else 0.0,
        "row_hits": rows.hits - before.hits,
        "row_misses": rows.misses - before.misses,
        "flash_bytes": rows.bytes_read - before.bytes_read,
        "memory_bytes": own_memory(),
        "memory_limit": model.plan.total,
    }
