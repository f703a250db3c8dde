"""Random tensors of safetensors files, drawn in pieces while they are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# All codes and floats are cut from blocks of this many bytes, because drawing billions would take minutes.
BLOCK_NBYTES = 1 << 23


class Tensor(NamedTuple):
    """Shape and dtype of a tensor, and how its values are drawn."""

    shape: tuple[int, ...]
    dtype: str = "BF16"
    bits: int = 0  # of a quantized value (code); 0: not quantized
    value: float = 1.0  # of a scalar or norm; the middle of random scales

    @property
    def nbytes(self) -> int:
        return {"BF16": 2, "F32": 4, "I64": 8}.get(self.dtype, 1) * math.prod(self.shape)

    def pieces(self, random: np.random.Generator) -> Iterator[Bytes]:
        """Yield the tensor's bytes: noise / sqrt(width) for a matrix, or codes if it is quantized.

        A float32 matrix has random scales around `value`; I64 is a permutation of 0, 1, ...
        """
        if self.dtype == "I64":
            yield random.permutation(self.shape[0]).view(np.uint8)
            return
        if self.dtype == "F32" or len(self.shape) < 2:
            scales = random.random(self.shape, np.float32) + 0.5 if len(self.shape) == 2 else 1.0
            values = np.full(self.shape, self.value, np.float32) * np.float32(scales)
            yield values.reshape(-1).view(np.uint8) if self.dtype == "F32" else _bfloat16(values)
            return
        block = _codes(self.bits) if self.bits else _noise(round(math.log2(self.shape[1]) / 2))
        left = self.nbytes
        while left:
            count = min(left, BLOCK_NBYTES // 2)
            start = 2 * int(random.integers((BLOCK_NBYTES - count) // 2))
            yield block[start : start + count]
            left -= count


def _bfloat16(values: npt.NDArray[np.float32]) -> Bytes:
    return (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@cache
def _noise(halvings: int) -> Bytes:
    drawn = np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 2, np.float32)
    return _bfloat16(drawn / np.float32(1 << halvings))


@cache
def _codes(bits: int) -> Bytes:
    """Return a block of normally distributed codes, low bits first; 8-bit codes are signed."""
    half, each = 1 << bits - 1, 8 // bits
    drawn = np.random.default_rng(bits).standard_normal((each, BLOCK_NBYTES), np.float32)
    codes = np.rint(drawn * (half / 2.5)).clip(-half, half - 1).astype(np.int16)
    codes = codes + half if bits < 8 else codes & 255
    packed = np.zeros(BLOCK_NBYTES, np.uint8)
    for at, part in enumerate(codes):
        packed |= (part << bits * at).astype(np.uint8)
    return packed
