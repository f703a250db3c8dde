"""Rotary position embedding (RoPE): the angles that reference model and runtime share."""

from __future__ import annotations

import numpy as np

from stem_edge.layers import Rope
from stem_edge.numerics.quantize import F32, I64


def rope_tables(rope: Rope, positions: int, start: int = 0) -> tuple[F32, F32]:
    """Return cosines and sines for the positions from `start` to `positions` - 1.

    Both are float32 [positions - start, head_dim / 2]. Angles are float32, as in training, because
    models are trained with the rounding of angles at large positions.
    """
    return rope_tables_at(rope, np.arange(start, positions))


def rope_tables_at(rope: Rope, positions: I64) -> tuple[F32, F32]:
    """Return cosines and sines, [T, head_dim / 2] each, of positions [T] in any order."""
    frequencies, factor = rope_frequencies(rope)
    angles = np.outer(positions.astype(np.float32), frequencies).astype(np.float32)
    return np.cos(angles) * factor, np.sin(angles) * factor


def rope_frequencies(rope: Rope) -> tuple[F32, np.float32]:
    """Return radians per position [head_dim / 2], and a factor for cosines and sines."""
    pairs = np.arange(0, rope.width, 2, dtype=np.float32) / np.float32(rope.width)
    # In float64, so that powers are rounded once, as nearly all of torch's. numpy's float32 powers often
    # differ in the last bit, which turns a head by a milliradian after 10,000 tokens.
    powers = np.power(np.float64(np.float32(rope.theta)), pairs.astype(np.float64))
    frequencies = np.asarray(np.float32(1) / powers.astype(np.float32), np.float32)
    if rope.scaling is None:
        return frequencies, np.float32(1)
    from stem_edge.numerics.rope_scaling import scaled  # only if needed

    return scaled(rope, frequencies)
