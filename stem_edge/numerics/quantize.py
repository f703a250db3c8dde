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
