"""Decodes matrices that transformers' gemma quantization packs: codes of 2, 4 or 8 bits with scales.

The first code of a byte is in its low bits; 8-bit codes are signed. A row has one scale or several.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.tensor import Codes, Tensor, bytes_of
from stem_edge.numerics.quantize import F32, U8
from stem_edge.numerics.quantizing import unpack_codes

PACKED = "U8", "I8"  # types of stored codes
BITS = 8, 4, 2  # of a code


def packed(stored: Tensor, scales: Tensor, width: int) -> Tensor:
    """Return a lazy matrix [N, width] from packed codes and scales. Raises CheckpointError."""
    rows, nbytes = (*stored.shape, 0, 0)[:2]
    sizes = {-(-width * bits // 8): bits for bits in BITS}
    bits = sizes.get(nbytes, 0)
    if bits == 0 or len(stored.shape) != 2 or (bits == 8) != (stored.dtype == "I8"):
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {stored.dtype} {list(stored.shape)}; expected codes of 2, "
            f"4 or 8 bits for {width} columns, as transformers' gemma quantization packs them"
        )
    parts = (*scales.shape, 0, 0)[1]
    if len(scales.shape) != 2 or scales.shape[0] != rows or not parts or width % parts:
        raise CheckpointError(
            f"{scales.path}: {scales.name} is {list(scales.shape)}; expected [{rows}, 1], or a number "
            f"of scales in a row that divides {width}"
        )

    def read(start: int, stop: int) -> U8:
        found = bytes_of(stored, start, stop)
        return found ^ np.uint8(0x80) if bits == 8 else unpack_codes(found, bits)[:, :width]

    codes = Codes(bits, width // parts, read, scales.rows)

    def values(start: int, stop: int) -> F32:
        factors, found = scales.rows(start, stop), read(start, stop)
        blocks = found.reshape(*factors.shape, codes.group_size).astype(np.float32)
        blocks -= np.uint8(1 << (bits - 1))
        # No numpy warnings for NaN and inf, because check_finite refuses them later.
        with np.errstate(over="ignore", invalid="ignore"):
            blocks *= factors[:, :, None]
        return blocks.reshape(len(found), width)

    return replace(stored.computed(values, (rows, width)), codes=codes)
