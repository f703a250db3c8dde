"""AltUp (arXiv 2301.13310) and LAuReL (arXiv 2411.07501) of Gemma 3n, in the reference model.

A token has several hidden states, called streams. Before a layer, each stream is predicted as a mix
of all streams. The layer computes only the active stream. Its change then corrects all streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.numerics.arithmetic import Observer, linear, mean_square, rms_norm
from stem_edge.numerics.quantize import F32

if TYPE_CHECKING:
    from stem_edge.numerics.matrix import Matrix

LEAST_SQUARE = 1e-5  # lower bound of a mean square that is divided by


def expanded(config: ModelConfig, backbone: Mapping[str, Matrix], x: F32) -> F32:
    """Return streams [T, hidden_width] of embedded tokens x [T, dim]: x and its projections."""
    streams = [x]
    for name in _between(config, "altup_in"):
        streams.append(_matched(linear(x, backbone, name), x))
    return np.concatenate(streams, axis=-1)


def merged(config: ModelConfig, backbone: Mapping[str, Matrix], x: F32, observe: Observer) -> F32:
    """Return the mean [T, dim] of streams x [T, hidden_width], projecting all but the first."""
    first, *others = np.split(x, config.streams, axis=-1)
    total = first
    for name, stream in zip(_between(config, "altup_out"), others, strict=True):
        observe(name, stream)
        total = total + _matched(linear(stream, backbone, name), first)
    return np.asarray(total / np.float32(config.streams), np.float32)


def predicted(config: ModelConfig, weights: Mapping[str, Matrix], x: F32) -> F32:
    """Predict the streams [T, streams, dim] from a layer's input streams x [T, hidden_width]."""
    streams = x.reshape(len(x), config.streams, config.dim)
    routed = _routed(config, weights, streams[:, config.active_stream])
    mixing = linear(routed, weights, "altup_predict").reshape(-1, config.streams, config.streams)
    return np.asarray(streams + mixing @ streams, np.float32)


def corrected(
    config: ModelConfig, weights: Mapping[str, Matrix], streams: F32, computed: F32
) -> F32:
    """Correct predicted hidden states [T, streams, dim] by a layer's result `computed` [T, dim]."""
    factors = 1 + linear(_routed(config, weights, computed), weights, "altup_correct")
    change = computed - streams[:, config.active_stream]
    return np.asarray(streams + factors[..., None] * change[:, None], np.float32)


def laurel(
    config: ModelConfig, at: str, weights: Mapping[str, Matrix], x: F32, observe: Observer
) -> F32:
    """Return x + norm(low-rank projection of attention's input x). at: name prefix for `observe`."""
    observe(at + "laurel_in", x)
    low = linear(x, weights, "laurel_in")
    observe(at + "laurel_out", low)
    return x + rms_norm(linear(low, weights, "laurel_out"), weights["laurel_norm"], config.norm_eps)


def _routed(config: ModelConfig, weights: Mapping[str, Matrix], x: F32) -> F32:
    """Return the output [T, streams] of AltUp's router for the stream x [T, dim]."""
    scaled = rms_norm(x, weights["altup_norm"], config.norm_eps) / np.float32(config.dim)
    return np.asarray(np.tanh(linear(scaled, weights, "altup_router")), np.float32)


def _matched(x: F32, like: F32) -> F32:
    """Scale each row of x [T, dim] to the root mean square of the same row of `like`."""
    magnitude = np.sqrt(np.maximum(mean_square(x), np.float32(LEAST_SQUARE)))
    return np.asarray(x * np.sqrt(mean_square(like)) / magnitude, np.float32)


def _between(config: ModelConfig, part: str) -> list[str]:
    """Return the names of the matrices altup_in or altup_out (`part`); stream 0 has none."""
    return [f"streams.{stream}.{part}" for stream in range(1, config.streams)]
