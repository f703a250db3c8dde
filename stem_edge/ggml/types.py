"""Tensor types of ggml that a backbone may have, with the numbers that GGUF files use for them.

Source: enum ggml_type and the block structs of ggml; ggml's docs/gguf.md lists the numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """Tensor type of ggml: each block of `block` values takes `nbytes` bytes."""

    name: str
    number: int
    block: int
    nbytes: int

    def row_nbytes(self, width: int) -> int:
        """Return the bytes of a row of `width` values, which must be a multiple of `block`."""
        return width // self.block * self.nbytes


F32 = TensorType("F32", 0, 1, 4)
F16 = TensorType("F16", 1, 1, 2)
Q4_0 = TensorType("Q4_0", 2, 32, 18)
Q5_0 = TensorType("Q5_0", 6, 32, 22)
Q5_1 = TensorType("Q5_1", 7, 32, 24)
Q8_0 = TensorType("Q8_0", 8, 32, 34)
Q4_K = TensorType("Q4_K", 12, 256, 144)
Q5_K = TensorType("Q5_K", 13, 256, 176)
Q6_K = TensorType("Q6_K", 14, 256, 210)
# Types of graph inputs only, not of weights.
I32 = TensorType("I32", 26, 1, 4)
I64 = TensorType("I64", 27, 1, 8)

WEIGHT_TYPES = {t.number: t for t in (F32, F16, Q4_0, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)}
# Types of matrices in imported GGUF files. A backbone may keep them, but no mixture contains them.
IMPORTED_TYPES = (
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("BF16", 30, 1, 2),
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("MXFP4", 39, 32, 17),
)
KEPT_TYPES = WEIGHT_TYPES | {t.number: t for t in IMPORTED_TYPES}
