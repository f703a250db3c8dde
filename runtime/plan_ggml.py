"""What ggml takes beside the row cache and the KV cache, for the memory plan."""

from __future__ import annotations

from stem_edge.footprint import FLOAT, HALF, Footprint

FIXED_NBYTES = 4 << 20  # of the library, descriptions of tensors and graphs
TILE = 64  # tokens, and as many cells, that a thread attends to at once


def weights_nbytes(footprint: Footprint, *, repack: bool) -> int:
    """Weights stay in their file, but for copies that are rearranged."""
    return FIXED_NBYTES + (footprint.repacked_nbytes if repack else 0)


def activations_nbytes(footprint: Footprint, chunk: int, context: int, threads: int) -> int:
    """Of a prompt chunk that ends a context."""
    config = footprint.model
    heads = config.n_heads + 2 * config.n_kv_heads
    # Gate, up and their product beside the hidden state, or q, k and v; then their 8-bit copies.
    per_token = 3 * config.dim + heads * config.head_dim + 4 * config.d_ff
    windows = len({config.window(layer) for layer in range(config.n_layers)})
    masks = (windows + 1) * context * HALF  # one more while it is made
    # Logits of one position, in ggml's memory and in ours, and what sampling makes of them.
    fixed = 3 * config.vocab_size
    return (
        chunk * (FLOAT * per_token + masks)
        + FLOAT * fixed
        + threads * _attention_nbytes(config.head_dim)
    )


def _attention_nbytes(head_dim: int) -> int:
    """What a thread takes for a tile: queries, keys, values, their sums; scores and masks."""
    return FLOAT * (4 * TILE * head_dim + 2 * TILE * TILE)
