"""Quantizers for onnxruntime's backbone: round to the nearest code, or GPTQ with calibration text.

For GPTQ, the text runs through the model layer by layer while the matrices are quantized. Blocks of
4 bits with a float offset hold the values of GGUF's Q4_1 and Q4_K exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import TypeAlias

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.head_padding import pad_heads
from stem_edge.export.quantization.gptq import Inputs, parts, solve, typical_inputs
from stem_edge.export.quantization.hidden_states import HEAD, HiddenStates
from stem_edge.export.quantization.streams import in_order
from stem_edge.graph.formats import LOW_STEPS, MATRIX_KINDS, BackboneFormat
from stem_edge.numerics.block_search import grid_scales, search_blocks
from stem_edge.numerics.matrix import ArrayMatrix, whole
from stem_edge.numerics.quantize import F32, F64
from stem_edge.numerics.quantizing import (
    Rounded,
    cut,
    dequantize_blocks,
    encode,
    extremes,
    pack_codes,
    quantize_asymmetric,
    reciprocals,
)

TOP, MIDDLE = 15, 8  # the highest code, and the code whose value is the offset
# Largest distance of a value from its level, in steps between levels. Blocks of 32 random values are
# hardly ever so close. Float32 rounding moves values by less, unless the offset is 10,000 steps.
NEAR = 1e-2
TILE_VALUES = 1 << 18  # at a time, so that they stay in the CPU's cache


def with_offsets(matrix: F32, block: int) -> Rounded:
    """Quantize a matrix [N, K] to 4 bits: value = (code - 8) * scale + offset.

    A block whose values lie on at most 16 evenly spaced levels is stored without loss, except for float32
    rounding. In other blocks, 16 levels divide the range from the least to the greatest value.
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
    return Rounded(pack_codes(codes, 4), scales, None, offsets)


def _levels(blocks: F64) -> F64:
    """Return the step between quantization levels [N, G] of blocks of values [N, G, block]."""
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


Quantize: TypeAlias = Callable[[F32], Rounded]  # rows [n, K] of a matrix -> their codes

SHARED = {"up": "gate", "v": "qkv"}  # product of a layer -> product with the same input


# Name, kind, bits and block of a matrix product -> thread-safe function that quantizes rows of its matrix.
# Callers ask for one product after the other, in the order of the data flow through the model.
Quantizer: TypeAlias = Callable[[str, str, int, int], Quantize]


def nearest(format: BackboneFormat) -> Quantizer:
    """Return a quantizer that rounds to the nearest code; scales come from each block's range."""

    def quantize(rows: F32, bits: int, block: int) -> Rounded:
        if format.offsets and bits == 4:
            return with_offsets(rows, block)
        if format.asymmetric:
            return quantize_asymmetric(rows, bits, block)
        return (_to_eight_bits if bits == 8 else _to_four_bits)(rows, block)

    return lambda name, kind, bits, block: lambda rows: quantize(rows, bits, block)


def calibrated(states: HiddenStates, config: ModelConfig, format: BackboneFormat) -> Quantizer:
    """Return a quantizer that uses GPTQ for 4 bits, and rounds to nearest for 8 bits."""
    # Input x of a matrix in the current layer -> for each part of its channels, sum of x x^T [k, k].
    moments = dict[str, list[F32]]()
    inputs, asymmetric, usual = dict[str, list[Inputs]](), format.asymmetric, nearest(format)

    def see(name: str, x: F32) -> None:
        at, _, part = name.rpartition(".")
        products = [p for p in MATRIX_KINDS if SHARED.get(p, p) == part]
        if not any(format.bits(p, f"{at}.{p}") == 4 for p in products):
            return  # all have 8 bits
        if name.endswith(".wo"):
            x = whole(pad_heads(config, int(at.split(".")[1]), {"wo": ArrayMatrix(x)})["wo"])
        each = (x[:, part].T @ x[:, part] for part in parts(x.shape[1]))
        if name in moments:
            for total, more in zip(moments[name], each, strict=True):
                total += more
        else:
            moments[name] = list(each)

    def typical(source: str, layer: int) -> list[Inputs]:
        """Run the calibration text up to a layer; return statistics of the input of `source`."""
        while states.layer <= layer:
            moments.clear()
            for each in inputs.values():
                each.clear()  # also frees them for callers that still hold a quantizer
            inputs.clear()
            states.advance(see if states.layer == layer else None)
        if moments:
            found = in_order(states.threads, typical_inputs, chain(*moments.values()))
            inputs.update({name: list(islice(found, len(moments[name]))) for name in moments})
            moments.clear()
        return inputs[source]

    def quantizer(name: str, kind: str, bits: int, block: int) -> Quantize:
        if bits == 8:
            return usual(name, kind, bits, block)
        if kind in ("embedding", "altup_in"):  # before the layers, without statistics
            return lambda rows: search_blocks(rows, bits, block, asymmetric=asymmetric)
        at, _, part = name.rpartition(".")
        source, layer = f"{at}.{SHARED.get(part, part)}", config.n_layers
        if kind == "head":
            source = HEAD
        elif at.startswith("layers."):
            layer = int(at.split(".")[1])
        found = typical(source, layer)
        return lambda rows: solve(rows, found, bits, block, asymmetric=asymmetric)

    return quantizer


def with_low_bits(quantize: Quantize, rows: F32) -> Rounded:
    """Quantize rows [n, K] to 4 bits, and what is left of them to 4 lower bits (BackboneFormat.split)."""
    high = quantize(rows)
    left = rows - dequantize_blocks(high.codes, high.scales, 4, high.zero_points)
    blocks = cut(left, rows.shape[1] // high.scales.shape[1])
    low, _ = encode(blocks, high.scales / np.float32(LOW_STEPS), np.float32(8), 4)
    return high._replace(low=low)


def _to_four_bits(rows: F32, block: int) -> Rounded:
    """Round rows [n, K] to 4 bits. Blocks that were trained for 4 bits are stored exactly."""
    blocks = cut(rows, block)
    grid, usual = grid_scales(blocks), extremes(blocks) / np.float32(-8)
    scales = np.asarray(np.where(grid != 0, grid, usual), np.float32)
    return Rounded(*encode(blocks, scales, np.float32(8), 4))


def _to_eight_bits(rows: F32, block: int) -> Rounded:
    """Round rows [n, K] to 8 bits. Blocks that came from GGUF's Q8_0 are stored exactly."""
    blocks = cut(rows, block)
    peaks = extremes(blocks)
    theirs = np.asarray(np.abs(peaks) / np.float32(127), np.float32)
    codes = np.rint(blocks * reciprocals(theirs)[:, :, None])
    kept = (codes * theirs[:, :, None] == blocks).all(axis=2)
    scales = np.asarray(np.where(kept, theirs, peaks / np.float32(-128)), np.float32)
    return Rounded(*encode(blocks, scales, np.float32(128), 8))
