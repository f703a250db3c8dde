"""Block quantization as onnxruntime's MatMulNBits and GatherBlockQuantized read it.

A matrix [N, K] is cut along K into blocks; a block of `bits`-bit codes shares one float32 scale:
`value = (code - 2**(bits-1)) * scale`. 4-bit codes are packed two to a byte, low nibble first.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]

MIN_BLOCK = 16  # both operators refuse smaller blocks


def fitting_block(width: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides `width`; below MIN_BLOCK it is 0.

    Blocks never straddle the end of a row: kernels disagree about how such a rest is padded.
    """
    block = 1 << (wanted.bit_length() - 1) if wanted > 0 else 0
    while block >= MIN_BLOCK and width % block:
        block //= 2
    return block if block >= MIN_BLOCK else 0


def quantize_blocks(matrix: F32, bits: int, block: int) -> tuple[U8, F32]:
    """Quantize [N, K] to codes [N, K*bits/8] and scales [N, K/block].

    The value of greatest magnitude in a block gets the code 0, so the full signed range
    -2**(bits-1) .. 2**(bits-1)-1 is used, as MLAS does; halves round to even here, up there.
    """
    rows, width = matrix.shape
    half = 1 << (bits - 1)
    blocks = matrix.reshape(rows, width // block, block)
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    extreme = np.where(-low >= high, low, high)
    scales = np.asarray(extreme / np.float32(-half), np.float32)
    # A subnormal scale has no float32 reciprocal: such a block is zero for every practical use.
    scales[np.abs(scales) < np.finfo(np.float32).tiny] = 0
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    scaled = blocks * inverse[:, :, None]
    np.rint(scaled, out=scaled)
    scaled += half
    np.clip(scaled, 0, 2 * half - 1, out=scaled)
    codes = scaled.astype(np.uint8).reshape(rows, width)
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return codes, scales


def dequantize_blocks(codes: U8, scales: F32, bits: int) -> F32:
    """The inverse: float32 [N, K] from codes [N, K*bits/8] and scales [N, K/block]."""
    if bits == 4:
        unpacked = np.empty((codes.shape[0], codes.shape[1] * 2), np.uint8)
        unpacked[:, 0::2], unpacked[:, 1::2] = codes & 15, codes >> 4
        codes = unpacked
    values = codes.astype(np.float32) - np.float32(1 << (bits - 1))
    block = codes.shape[1] // scales.shape[1]
    blocks = values.reshape(*scales.shape, block) * scales[:, :, None]
    return np.asarray(blocks.reshape(codes.shape), np.float32)


def zero_points(rows: int, groups: int, bits: int) -> U8:
    """Zero points [rows, ceil(groups*bits/8)] of these symmetric codes, packed like the codes."""
    return np.full((rows, -(-groups * bits // 8)), {8: 0x80, 4: 0x88}[bits], np.uint8)
