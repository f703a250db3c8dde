"""Block quantization as onnxruntime's MatMulNBits and GatherBlockQuantized read it.

A matrix [N, K] is cut along K into blocks; a block of `bits`-bit codes shares one float32 scale and
one zero point: `value = (code - zero_point) * scale`. Symmetric blocks all have the zero point
2**(bits-1), which need not be stored. Codes and zero points of 4 and 2 bits are packed two and four
to a byte, the first in the lowest bits. Each row begins with a new byte.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]

MIN_BLOCK = 16  # both operators refuse smaller blocks


def fitting_block(width: int, wanted: int) -> int:
    """Return the largest power of two <= `wanted` that divides `width`; 0 if it is below MIN_BLOCK.

    Blocks never straddle the end of a row, because kernels pad shorter blocks differently.
    """
    block = 1 << (wanted.bit_length() - 1) if wanted > 0 else 0
    while block >= MIN_BLOCK and width % block:
        block //= 2
    return block if block >= MIN_BLOCK else 0


def zero_points(rows: int, groups: int, bits: int) -> U8:
    """Return the packed zero points [rows, ceil(groups*bits/8)] of symmetric blocks."""
    middle = {8: 0x80, 4: 0x88, 2: 0xAA}[bits]
    return np.full((rows, -(-groups * bits // 8)), middle, np.uint8)


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
