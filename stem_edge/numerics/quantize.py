"""Block quantization as onnxruntime's MatMulNBits and GatherBlockQuantized read it.

A matrix [N, K] is cut along K into blocks; a block of `bits`-bit codes shares one float32 scale and
one zero point: `value = (code - zero_point) * scale`. Symmetric blocks all have the zero point
2**(bits-1), which need not be stored. 4-bit codes and zero points are packed two to a byte, low
nibble first, each row from a whole byte on.

Scales here are those of the block's range (round to nearest); block_search.py finds better ones.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

# Names for arrays by the type of their values, used in the whole package.
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]

MIN_BLOCK = 16  # both operators refuse smaller blocks


class Blocks(NamedTuple):
    """A quantized matrix [N, K]."""

    codes: U8  # [N, K*bits/8]
    scales: F32  # [N, K/block]
    zero_points: U8 | None = None  # [N, ceil(K/block*bits/8)]; None: symmetric
    offsets: F32 | None = None  # [N, K/block], added to the values of a block


def fitting_block(width: int, wanted: int) -> int:
    """Largest power of two up to `wanted` that divides `width`; 0 if it is below MIN_BLOCK.

    Blocks never straddle the end of a row, because kernels disagree about how to pad the rest.
    """
    block = 1 << (wanted.bit_length() - 1) if wanted > 0 else 0
    while block >= MIN_BLOCK and width % block:
        block //= 2
    return block if block >= MIN_BLOCK else 0


def quantize_blocks(matrix: F32, bits: int, block: int) -> tuple[U8, F32]:
    """Quantize [N, K] to codes [N, K*bits/8] and scales [N, K/block], symmetrically.

    The value of greatest magnitude in a block gets the code 0, so the full signed range
    -2**(bits-1) .. 2**(bits-1)-1 is used, as in MLAS. Halves round to even here, up in MLAS.
    """
    half = 1 << (bits - 1)
    blocks = cut(matrix, block)
    scales = np.asarray(extremes(blocks) / np.float32(-half), np.float32)
    return encode(blocks, scales, np.float32(half), bits)


def quantize_asymmetric(matrix: F32, bits: int, block: int) -> Blocks:
    """Quantize [N, K] with a zero point for each block, so that its range takes all codes.

    As in MLAS, the range is widened to include zero, which stays exact.
    """
    top = (1 << bits) - 1
    blocks = cut(matrix, block)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    # Divided before the subtraction, because the width of the range may overflow float32.
    scales = np.asarray(high / top - low / top, np.float32)
    zeros = np.clip(np.rint(-low * reciprocals(scales)), 0, top)
    codes, scales = encode(blocks, scales, zeros, bits)
    return Blocks(codes, scales, pack_codes(zeros.astype(np.uint8), bits))


def dequantize_blocks(
    codes: U8,
    scales: F32,
    bits: int,
    zero_points: U8 | None = None,
    offsets: F32 | None = None,
) -> F32:
    """Dequantize codes [N, K*bits/8] with scales [N, K/block] to float32 [N, K]."""
    rows, groups = scales.shape
    width = codes.shape[1] * 8 // bits
    values = unpack_codes(codes, bits).astype(np.float32).reshape(rows, groups, width // groups)
    if zero_points is None:
        values -= np.float32(1 << (bits - 1))
    else:
        values -= unpack_codes(zero_points, bits)[:, :groups, None]
    values *= scales[:, :, None]
    if offsets is not None:
        values += offsets[:, :, None]
    return values.reshape(rows, width)


def zero_points(rows: int, groups: int, bits: int) -> U8:
    """Zero points [rows, ceil(groups*bits/8)] of symmetric codes, packed as codes are."""
    return np.full((rows, -(-groups * bits // 8)), {8: 0x80, 4: 0x88}[bits], np.uint8)


def cut(matrix: F32, block: int) -> F32:
    """Reshape [N, K] to blocks [N, K/block, block]."""
    rows, width = matrix.shape
    return matrix.reshape(rows, width // block, block)


def extremes(blocks: F32) -> F32:
    """Value of greatest magnitude in each block of [N, G, block], with its sign."""
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    return np.asarray(np.where(-low >= high, low, high), np.float32)


def reciprocals(scales: F32) -> F32:
    """1 / scales, or 0 where float32 cannot hold that."""
    # The reciprocal of a subnormal scale overflows; its block is zero for all practical purposes.
    usable = np.abs(scales) >= np.finfo(np.float32).tiny
    return np.divide(1, scales, out=np.zeros_like(scales), where=usable)


def encode(blocks: F32, scales: F32, zeros: F32 | np.float32, bits: int) -> tuple[U8, F32]:
    """Encode blocks [N, G, block] to the nearest codes [N, K*bits/8], and scales [N, G] for them.

    zeros: unpacked zero points, one for all blocks or [N, G]. Scales too small to divide by
    become 0.
    """
    inverse = reciprocals(scales)
    scaled = blocks * inverse[:, :, None]
    np.rint(scaled, out=scaled)
    scaled += zeros if np.ndim(zeros) == 0 else np.asarray(zeros)[:, :, None]
    np.clip(scaled, 0, (1 << bits) - 1, out=scaled)
    codes = scaled.astype(np.uint8).reshape(len(blocks), blocks.shape[1] * blocks.shape[2])
    return pack_codes(codes, bits), np.where(inverse != 0, scales, np.float32(0))


def pack_codes(codes: U8, bits: int) -> U8:
    """Pack codes [N, K] into bytes [N, ceil(K*bits/8)]; the rest of a last byte is 0."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def unpack_codes(packed: U8, bits: int) -> U8:
    """Undo pack_codes; the rest of a last byte becomes one more code."""
    if bits == 8:
        return packed
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    return codes
