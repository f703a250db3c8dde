"""What ggml takes beside the row cache and the KV cache, for the memory plan."""

from __future__ import annotations

from stem_edge.footprint import FLOAT, Footprint

FIXED_NBYTES = 4 << 20  # of the library, descriptions of tensors and graphs


def weights_nbytes(footprint: Footprint, *, repack: bool) -> int:
    """Weights stay in their file, but for copies that are rearranged."""
    return FIXED_NBYTES + (footprint.repacked_nbytes if repack else 0)


def activations_nbytes(footprint: Footprint, chunk: int, context: int, threads: int) -> int:
    """Of a prompt chunk that ends a context."""
    config = footprint.model
    heads = config.n_heads + 2 * config.n_kv_heads
    per_token = 6 * config.dim + 2 * heads * config.head_dim + 4 * config.d_ff
    fixed = 3 * config.vocab_size + context
    return FLOAT * (chunk * (per_token + context) + fixed)
