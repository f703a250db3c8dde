"""Scaling of RoPE: lower frequencies, for contexts longer than those of the first training."""

from __future__ import annotations

import math

import numpy as np

from stem_edge.layers import LinearRope, Llama3Rope, ProportionalRope, Rope, YarnRope
from stem_edge.numerics.quantize import F32


def scaled(rope: Rope, frequencies: F32) -> tuple[F32, np.float32]:
    """Return scaled frequencies [head_dim / 2], and a factor for cosines and sines."""
    match rope.scaling:
        case LinearRope(factor):
            return frequencies / np.float32(factor), np.float32(1)
        case Llama3Rope() as scaling:
            return _llama3(frequencies, scaling), np.float32(1)
        case ProportionalRope(share, factor):
            turning = np.arange(len(frequencies)) < int(share * rope.width // 2)
            frequencies = np.where(turning, frequencies / np.float32(factor), np.float32(0))
            return frequencies, np.float32(1)
        case YarnRope() as scaling:
            return _yarn(frequencies, scaling, rope), np.float32(scaling.attention_factor)
    return frequencies, np.float32(1)


def _llama3(frequencies: F32, scaling: Llama3Rope) -> F32:
    turns = np.float32(scaling.original_context) * frequencies / np.float32(2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    slow = frequencies / np.float32(scaling.factor)
    return np.asarray((1 - keep) * slow + keep * frequencies, np.float32)


def _yarn(frequencies: F32, scaling: YarnRope, rope: Rope) -> F32:
    def dimension(turns: float) -> float:
        """Return the dimension whose angle makes this many turns over the original context."""
        waves = scaling.original_context / (turns * 2 * math.pi)
        return rope.width * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    places = np.arange(len(frequencies), dtype=np.float32)
    # At least 0.001, to avoid dividing by zero where the ramp is a step.
    ramp = np.clip((places - low) / np.float32(max(high - low, 0.001)), 0, 1)
    slow = frequencies / np.float32(scaling.factor)
    return np.asarray(ramp * slow + (1 - ramp) * frequencies, np.float32)
