"""What the portable variant takes beyond what stem_edge.runtime.plan_ort counts, for the memory plan."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.footprint import FLOAT, Footprint
from stem_edge.graph.names import head_width

# A product of so many values is one matrix (stem_edge.export.linear cuts a head into such pieces).
PIECE_VALUES = 1 << 24
MASK_VALUE_NBYTES = 16  # float32, and what it is computed from
SCORE_ARRAYS = 2  # masked and as weights, beside the one that is counted there


def portable_nbytes(footprint: Footprint, chunk: int, context: int) -> int:
    """Of a prompt chunk that ends a context: rows, masks, keys and values in other orders, and a
    matrix in floats, twice, for providers that make it so when they multiply."""
    config, seen = footprint.model, context + chunk
    windows = len({config.window(layer) for layer in range(config.n_layers)})
    cached = 2 * config.n_kv_heads * head_width(config)  # values of a token and a layer
    row = footprint.tables.row_width if footprint.tables else 0
    values = chunk * row * (len(config.stem_layers) + 2)
    values += SCORE_ARRAYS * chunk * config.n_heads * seen
    values += 2 * cached * seen + config.n_layers * cached * chunk
    values += 2 * _largest(config)
    return FLOAT * values + windows * MASK_VALUE_NBYTES * chunk * seen + footprint.embedding_nbytes


def _largest(config: ModelConfig) -> int:
    """Values of the largest matrix that is one product."""
    width = head_width(config)
    wide = max((config.n_heads + 2 * config.n_kv_heads) * width, config.d_ff)
    head = min(config.vocab_size * config.dim, 2 * PIECE_VALUES)
    return max(config.dim * wide, head)
