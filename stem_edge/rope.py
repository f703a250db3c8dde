"""Rotary position embedding: the angles that reference model and runtime share."""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.quantize import F32


def rope_tables(config: ModelConfig, positions: int) -> tuple[F32, F32]:
    """Cosines and sines [positions, head_dim / 2], float32.

    Computed in float32 throughout, as the trainers do: at large positions the rounding of the angle
    is part of what the model was trained with.
    """
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), pairs)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies).astype(np.float32)
    return np.cos(angles), np.sin(angles)


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
