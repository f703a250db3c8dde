"""Computes peaks (greatest magnitudes) of keys and values, for scales of a quantized KV cache.

RoPE rotates a pair of key channels by an angle that depends on the position, so at some position either
channel may reach the pair's norm. Both channels therefore get the peak of this norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.head_padding import pad_vector
from stem_edge.graph.kv import KEYS, VALUES
from stem_edge.layers import Layer
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_frequencies

TEXT_TOKENS = 1024  # of a calibration text


def kv_peaks(config: ModelConfig, number: int, pairs: Iterable[tuple[F32, F32]]) -> dict[str, F32]:
    """Return the peaks of layer `number`: tensor name (stem_edge.graph.weight_plan) -> [kv heads * width], positive.

    pairs: keys and values [T, kv heads, head_dim] of the layer, for each sequence. A channel that was
    always 0, such as padding, gets the greatest peak of its layer, or 1.
    """
    found, layer = dict[str, F32](), config.layer(number)
    both = [(_pair_lengths(config, layer, keys), np.abs(values)) for keys, values in pairs]
    for at, (what, matrix) in enumerate(((KEYS, "wk"), (VALUES, "wv"))):
        peaks = np.maximum.reduce([each[at].max(axis=0) for each in both])
        known = pad_vector(config, number, matrix, peaks.ravel())
        found[f"layers.{number}.{what}.peaks"] = np.where(known > 0, known, peaks.max() or 1)
    return found


def _pair_lengths(config: ModelConfig, layer: Layer, keys: F32) -> F32:
    """Return keys [T, heads, head_dim] with each value replaced by the norm of its RoPE pair."""
    half, axis = layer.head_dim // 2, -1 if config.rope_interleaved else -2
    pairs = keys.reshape(*keys.shape[:2], *((half, 2) if axis == -1 else (2, half)))
    lengths = np.sqrt(np.square(pairs).sum(axis=axis, keepdims=True))
    turns = rope_frequencies(layer.rope)[0] != 0
    found = np.where(turns[:, None] if axis == -1 else turns, lengths, np.abs(pairs))
    return np.asarray(found.reshape(keys.shape), np.float32)
