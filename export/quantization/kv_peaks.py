"""Peaks: greatest magnitudes of keys and values. They give the scales of a quantized KV cache.

Keys are rotated first. RoPE rotates pairs of channels by an angle that depends on the position,
so both channels get the peak of the pair's length.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.head_padding import pad_vector
from stem_edge.graph.kv import KEYS, VALUES
from stem_edge.layers import Layer
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_frequencies

TEXT_TOKENS = 1024  # of a calibration text


class KvPeaks:
    """Peaks of each layer that computes keys and values, over all tokens that it has seen."""

    def __init__(self, config: ModelConfig) -> None:
        self._config, self._found = config, dict[tuple[int, str], F32]()

    def padded(self) -> dict[str, F32]:
        """Return name of a tensor (stem_edge.graph.kv) -> peaks [kv heads * width], all positive.

        A channel that was always 0, as padding is, has the greatest peak of its layer, or 1.
        """
        config, found = self._config, dict[str, F32]()
        for (number, what), peaks in self._found.items():
            known = pad_vector(config, number, "wk" if what == KEYS else "wv", peaks.ravel())
            found[f"layers.{number}.{what}.peaks"] = np.where(known > 0, known, peaks.max() or 1)
        return found

    def see(self, number: int, keys: F32, values: F32) -> None:
        """Count a layer's keys and values [T, kv heads, head_dim]."""
        lengths = _pair_lengths(self._config, self._config.layer(number), keys)
        for what, magnitudes in ((KEYS, lengths), (VALUES, np.abs(values))):
            peaks = magnitudes.max(axis=0)
            known = self._found.get((number, what), peaks)
            self._found[number, what] = np.maximum(known, peaks)


def _pair_lengths(config: ModelConfig, layer: Layer, keys: F32) -> F32:
    """Return for each channel of keys [T, heads, head_dim] the length of the pair that it turns in."""
    half, axis = layer.head_dim // 2, -1 if config.rope_interleaved else -2
    pairs = keys.reshape(*keys.shape[:2], *((half, 2) if axis == -1 else (2, half)))
    lengths = np.sqrt(np.square(pairs).sum(axis=axis, keepdims=True))
    turns = rope_frequencies(layer.rope)[0] != 0
    found = np.where(turns[:, None] if axis == -1 else turns, lengths, np.abs(pairs))
    return np.asarray(found.reshape(keys.shape), np.float32)
