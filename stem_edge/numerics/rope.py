"""Rotary position embedding (RoPE): the angles that reference model and runtime share."""

from __future__ import annotations

import math

import numpy as np

from stem_edge.layers import LinearRope, Llama3Rope, ProportionalRope, Rope, YarnRope
from stem_edge.numerics.quantize import F32, I64


def rope_tables(rope: Rope, positions: int, start: int = 0) -> tuple[F32, F32]:
    """Cosines and sines [positions - start, head_dim / 2], float32, of positions from `start` on.

    Computed in float32 throughout, as trainers do, because at large positions the rounding of the
    angle is part of what the model was trained with.
    """
    return rope_tables_at(rope, np.arange(start, positions))


def rope_tables_at(rope: Rope, positions: I64) -> tuple[F32, F32]:
    """Return what rope_tables returns, [T, head_dim / 2], of positions [T] in any order."""
    frequencies, factor = rope_frequencies(rope)
    angles = np.outer(positions.astype(np.float32), frequencies).astype(np.float32)
    return np.cos(angles) * factor, np.sin(angles) * factor


def rope_frequencies(rope: Rope) -> tuple[F32, np.float32]:
    """Radians per position, [head_dim / 2], and the factor on cosines and sines."""
    frequencies = _unscaled(rope)
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


def frequency_factors(rope: Rope) -> F32 | None:
    """Divisors [head_dim / 2] by which RoPE scaling lowers frequencies, infinite for those that
    become 0; None without scaling."""
    if rope.scaling is None:
        return None
    with np.errstate(divide="ignore"):
        return np.asarray(_unscaled(rope) / rope_frequencies(rope)[0], np.float32)


def _unscaled(rope: Rope) -> F32:
    pairs = np.arange(0, rope.width, 2, dtype=np.float32) / np.float32(rope.width)
    # Rounded once, as torch's powers nearly all are. Those that numpy computes in float32 often are
    # the next number to that, which turns a head by a milliradian after 10,000 tokens.
    powers = np.power(np.float64(np.float32(rope.theta)), pairs.astype(np.float64))
    return np.asarray(np.float32(1) / powers.astype(np.float32), np.float32)


def _llama3(frequencies: F32, scaling: Llama3Rope) -> F32:
    turns = np.float32(scaling.original_context) * frequencies / np.float32(2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    slow = frequencies / np.float32(scaling.factor)
    return np.asarray((1 - keep) * slow + keep * frequencies, np.float32)


def _yarn(frequencies: F32, scaling: YarnRope, rope: Rope) -> F32:
    def dimension(turns: float) -> float:
        """Dimension whose wave makes this many turns in the original context."""
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


def rotate(heads: F32, cos: F32, sin: F32, interleaved: bool) -> F32:
    """Rotate heads [T, H, head_dim] by the angles [T, head_dim / 2] of their positions."""
    half = heads.shape[-1] // 2
    a, b = (
        (heads[..., 0::2], heads[..., 1::2])
        if interleaved
        else (heads[..., :half], heads[..., half:])
    )
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = (a * cos - b * sin, a * sin + b * cos)
    if not interleaved:
        return np.concatenate(rotated, axis=-1)
    return np.stack(rotated, axis=-1).reshape(heads.shape)
