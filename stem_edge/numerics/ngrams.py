"""N-gram rows in the reference model: averaged with the input embedding, or gated into layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.numerics.arithmetic import Observer, linear, logistic, rms_norm, silu
from stem_edge.numerics.matrix import Matrix, whole
from stem_edge.numerics.quantize import F32

LEAST_GATE = 1e-6  # lower bound of the magnitude whose square root is taken


def with_ngrams(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Matrix],
    x: F32,
    rows: F32,
    observe: Observer,
) -> F32:
    """Return a layer's input x [T, dim] with n-gram rows [T * lookups, width] added or averaged."""
    rows = rows.reshape(len(x), -1)
    if config.stem_ffn == "engram":
        of_layers = np.split(rows, len(config.stem_layers), axis=1)
        own = of_layers[config.stem_layers.index(layer)]
        observe(f"layers.{layer}.project", own)
        return x + _engram(config, weights, x, linear(own, weights, "project"))
    observe(f"layers.{layer}.project", rows)
    return (x + linear(rows, weights, "project")) / np.float32(1 + config.lookups)


def _engram(config: ModelConfig, weights: Mapping[str, Matrix], x: F32, both: F32) -> F32:
    """Return the Engram term for x [T, dim]: v + SiLU(convolution(norm(v))), v = gated values.

    both: keys and values [T, 2 * dim] from the n-gram rows. The convolution sums over
    `engram_kernel` tokens that are `ngram_order` apart, separately for each channel.
    """
    keys, values = np.split(both, 2, axis=1)
    query = rms_norm(x, weights["engram_query_norm"], config.norm_eps)
    match = query * rms_norm(keys, weights["engram_key_norm"], config.norm_eps)
    dot = match.sum(axis=1, keepdims=True) / np.sqrt(np.float32(config.dim))
    gate = np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), np.float32(LEAST_GATE)))
    gated = logistic(gate) * values
    if not config.engram_kernel:
        return gated
    normed = rms_norm(gated, weights["engram_conv_norm"], config.norm_eps)
    total = np.zeros_like(x)
    for tap in range(config.engram_kernel):
        ago = (config.engram_kernel - 1 - tap) * config.ngram_order
        total[ago:] += normed[: max(0, len(x) - ago)] * whole(weights[f"engram_conv_{tap}"])
    return gated + silu(total)
