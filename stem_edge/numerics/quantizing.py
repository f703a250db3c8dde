"""Rounds matrices to the nearest codes of blocks (quantize.py): scales from min and max."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.numerics.quantize import F32, U8


class Rounded(NamedTuple):
    """A quantized matrix [N, K]."""

    codes: U8  # [N, K*bits/8]
    scales: F32  # [N, K/block]
    zero_points: U8 | None = None  # [N, ceil(K/block*bits/8)]; None: symmetric
    offsets: F32 | None = None  # [N, K/block], added to all values of a block
    low: U8 | None = None  # [N, K/2], 4 lower bits of 8 (BackboneFormat.split)


def quantize_asymmetric(matrix: F32, bits: int, block: int) -> Rounded:
    """Quantize [N, K] with a zero point for each block, so that its range uses all codes.

    As in MLAS, the range is widened to include zero, which stays exact.
    """
    top = (1 << bits) - 1
    blocks = cut(matrix, block)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    # Divided before the subtraction, because the width of the range may overflow float32.
    scales = np.asarray(high / top - low / top, np.float32)
    zeros = np.clip(np.rint(-low * reciprocals(scales)), 0, top)
    codes, scales = encode(blocks, scales, zeros, bits)
    return Rounded(codes, scales, pack_codes(zeros.astype(np.uint8), bits))


def cut(matrix: F32, block: int) -> F32:
    """Reshape [N, K] to blocks [N, K/block, block]."""
    rows, width = matrix.shape
    return matrix.reshape(rows, width // block, block)


def extremes(blocks: F32) -> F32:
    """Return the value [N, G] of greatest magnitude, with its sign, in blocks [N, G, block]."""
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    return np.asarray(np.where(-low >= high, low, high), np.float32)


def reciprocals(scales: F32) -> F32:
    """Return 1 / scales; 0 for a scale so small that the result exceeds float32."""
    # The reciprocal of a subnormal scale overflows; its block is zero for all practical purposes.
    usable = np.abs(scales) >= np.finfo(np.float32).tiny
    return np.divide(1, scales, out=np.zeros_like(scales), where=usable)


def encode(blocks: F32, scales: F32, zeros: F32 | np.float32, bits: int) -> tuple[U8, F32]:
    """Quantize blocks [N, G, block] by `scales`; return packed codes [N, K*bits/8] and scales.

    zeros: unpacked zero points, one for all blocks or [N, G]. Scales [N, G] that are too small to
    divide by become 0.
    """
    inverse = reciprocals(scales)
    scaled = blocks * inverse[:, :, None]
    np.rint(scaled, out=scaled)
    scaled += zeros if np.ndim(zeros) == 0 else np.asarray(zeros)[:, :, None]
    np.clip(scaled, 0, (1 << bits) - 1, out=scaled)
    codes = scaled.astype(np.uint8).reshape(len(blocks), blocks.shape[1] * blocks.shape[2])
    return pack_codes(codes, bits), np.where(inverse != 0, scales, np.float32(0))


def dequantize_blocks(
    codes: U8,
    scales: F32,
    bits: int,
    zero_points: U8 | None = None,
) -> F32:
    """Dequantize codes [N, K*bits/8] with scales [N, K/block] to float32 [N, K].

    zero_points: packed; None: the middle code.
    """
    rows, groups = scales.shape
    width = codes.shape[1] * 8 // bits
    values = unpack_codes(codes, bits).astype(np.float32).reshape(rows, groups, width // groups)
    if zero_points is None:
        values -= np.float32(1 << (bits - 1))
    else:
        values -= unpack_codes(zero_points, bits)[:, :groups, None]
    values *= scales[:, :, None]
    return values.reshape(rows, width)


def unpack_codes(packed: U8, bits: int) -> U8:
    """Unpack bytes [..., n] to codes [..., n * 8 / bits], with any padding of the last byte."""
    if bits == 8:
        return packed
    count, mask = 8 // bits, np.uint8((1 << bits) - 1)
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * count), np.uint8)
    for at in range(count):
        np.bitwise_and(packed >> np.uint8(at * bits), mask, out=codes[..., at::count])
    return codes


def pack_codes(codes: U8, bits: int) -> U8:
    """Pack codes [..., K] into bytes [..., ceil(K*bits/8)]. Unused bits of the last byte are 0."""
    if bits == 8:
        return codes
    count = 8 // bits
    if rest := -codes.shape[-1] % count:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, rest)])
    packed = codes[..., 0::count].copy()
    for at in range(1, count):
        packed |= codes[..., at::count] << np.uint8(at * bits)
    return packed
