"""Blocks of 4 bits with a float offset, which keep what Q4_1 and Q4_K of a GGUF file hold."""

from __future__ import annotations

import numpy as np

from stem_edge.numerics.quantize import F32, F64
from stem_edge.numerics.quantizing import Blocks, cut, pack_codes

TOP, MIDDLE = 15, 8  # the highest code, and the one that stands for the offset alone
# Greatest distance from a level, in steps between levels. 32 values that lie on no levels hardly
# ever pass; rounding to float32 moves values by less, unless an offset is 10,000 steps.
NEAR = 1e-2
TILE_VALUES = 1 << 18  # at a time, so that they stay in the CPU's cache


def with_offsets(matrix: F32, block: int) -> Blocks:
    """Quantize [N, K] to 4 bits: value = (code - 8) * scale + offset.

    Values of a block that have at most 16 evenly spaced levels are kept, up to a rounding of float32;
    those of other blocks go to the nearest of 16 levels from the least to the greatest of them.
    """
    rows, width = matrix.shape
    codes = np.empty((rows, width), np.uint8)
    scales, offsets = np.empty((2, rows, width // block), np.float32)
    step = max(1, TILE_VALUES // width)
    for start in range(0, rows, step):
        here = slice(start, start + step)
        blocks = cut(matrix[here], block).astype(np.float64)
        least, steps = blocks.min(axis=2), _levels(blocks)
        units = _units(blocks, least, steps)
        codes[here] = np.rint(units).reshape(len(units), width).astype(np.uint8)
        scales[here], offsets[here] = steps, least + MIDDLE * steps
    return Blocks(pack_codes(codes, 4), scales, None, offsets)


def _levels(blocks: F64) -> F64:
    """Return the distance between levels [N, G] of the values of blocks [N, G, block]."""
    least, greatest = blocks.min(axis=2), blocks.max(axis=2)
    found = np.asarray((greatest - least) / TOP, np.float64)
    open_ = found > 0
    for top in range(TOP, 0, -1):  # steps between the least and the greatest value
        values, low, high = blocks[open_], least[open_], greatest[open_]
        step = (high - low) / top
        units = _units(values, low, step)
        fits = (np.abs(units - np.rint(units)) < NEAR).all(axis=1)
        left = np.flatnonzero(open_)[fits]
        found.ravel()[left] = step[fits]
        open_.ravel()[left] = False
        if not open_.any():
            break
    return found


def _units(values: F64, least: F64, steps: F64) -> F64:
    usable = np.where(steps > 0, steps, 1)
    return np.asarray((values - least[..., None]) / usable[..., None], np.float64)
