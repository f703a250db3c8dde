"""What a backbone on ggml needs of memory."""

from __future__ import annotations

from stem_edge.footprint import FLOAT, HALF, Footprint
from stem_edge.runtime.plan import Needs, Part

FIXED_NBYTES = 4 << 20  # of the library, descriptions of tensors and graphs
TILE = 64  # tokens, and as many cells, that a thread attends to at once


def ggml_needs(footprint: Footprint, context: int, threads: int, *, repack: bool) -> Needs:
    """Weights stay in their file, but for copies that are rearranged."""
    config = footprint.model
    heads = config.n_heads + 2 * config.n_kv_heads
    # Gate, up and their product beside the hidden state, or q, k and v; then their 8-bit copies.
    per_token = 3 * config.dim + heads * config.head_dim + 4 * config.d_ff
    windows = len({config.window(layer) for layer in range(config.n_layers)})
    masks = (windows + 1) * context * HALF  # one more while it is made
    # Logits of one position, in ggml's memory and in ours, and what sampling makes of them.
    logits = FLOAT * 3 * config.vocab_size
    # A thread's tile: queries, keys, values, their sums; scores and masks.
    tile = FLOAT * (4 * TILE * config.head_dim + 2 * TILE * TILE)
    part = Part(
        weights=FIXED_NBYTES + (footprint.repacked_nbytes if repack else 0),
        kv_cache=footprint.kv_nbytes(context),
        fixed=logits + threads * tile,
        chunk_token=FLOAT * per_token + masks,
        slot=footprint.slot_nbytes,
    )
    saving = ", or load without repack" if repack else ""
    return Needs(footprint, context, part, repack=repack, saving=saving)
