"""What onnxruntime takes beside the row cache and the KV cache, for the memory plan."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.footprint import FLOAT, Footprint
from stem_edge.graph.names import head_width
from stem_edge.table_store import TableFormat

WIDE_ARRAYS, WIDE_ARRAYS_OF_PREFILL = 10, 15
# What onnxruntime keeps for itself: beside mapped weights, measured with 1B models (README); beside
# weights in its own memory, with small ones.
PREPARED_FIXED_NBYTES = 32 << 20
UNPREPARED_FIXED_NBYTES = 12 << 20
# That holds for so many layers; each beyond is a few dozen nodes more, in each graph that has it.
LAYERS_IN_FIXED, LAYER_NBYTES = 32, 1 << 18


def weights_nbytes(footprint: Footprint, *, prepared: bool, prefill: bool) -> int:
    """Of external data, what does not stay in its file."""
    deep = max(0, footprint.model.n_layers - LAYERS_IN_FIXED)
    nodes = deep * LAYER_NBYTES * (2 if prefill else 1)
    if prepared:
        return PREPARED_FIXED_NBYTES + nodes
    return (
        UNPREPARED_FIXED_NBYTES
        + nodes
        + footprint.step_nbytes
        + (footprint.prefill_nbytes if prefill else 0)
    )


def activations_nbytes(
    footprint: Footprint, chunk: int, context: int, threads: int, *, prefill: bool
) -> int:
    """Of a prompt chunk that ends a context."""
    config = footprint.model
    heads, width = config.n_heads, head_width(config)
    # Hidden states and their norms, q, k and v; then gate, row, their product, its codes. Measured:
    # onnxruntime has more of these alive at once than the graph needs, and most of them in prefill.
    wide = WIDE_ARRAYS_OF_PREFILL if prefill else WIDE_ARRAYS
    per_token = 8 * config.dim + 2 * (heads + 2 * config.n_kv_heads) * width + wide * config.d_ff
    # Tables of RoPE and, twice, logits of one position.
    fixed = context * width + 2 * config.vocab_size
    experts = _experts_nbytes(config, footprint.table_format, min(chunk, threads))
    return FLOAT * (chunk * (per_token + heads * context) + fixed) + experts


def _experts_nbytes(config: ModelConfig, tables: TableFormat | None, threads: int) -> int:
    """Quantized experts are dequantized while they run, one in each thread."""
    if tables is None or not config.n_experts or not tables.tables.quantized:
        return 0
    return threads * FLOAT * tables.tables.row_width
