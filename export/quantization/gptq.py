"""GPTQ (arXiv 2210.17323): rounding a matrix column by column, while the columns that are still to
come make up for what each rounding does to the products with typical inputs.

With H the sum of x x^T over typical inputs and U the upper Cholesky factor of its inverse, the error
e of column j, divided by U[j, j], is subtracted from every later column k as e U[j, k]. Columns of
large inputs come first, because later ones can make up for their errors. Scales are found before,
so that they suit the blocks as they lie in the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.errors import ExportError
from stem_edge.numerics.block_search import search_scales
from stem_edge.numerics.quantize import F32, U8, pack_codes
from stem_edge.numerics.quantizing import Rounded, cut, reciprocals

# Share of the mean diagonal that is added to the diagonal, because inputs that the calibration text
# never had must not be taken for impossible. With 0.01, as in the paper, some thousand tokens are
# taken for all there is: on other text, products are 8 % further off (SmolLM2-135M-Instruct).
DAMPING = 0.1
DAMPING_STEP = 10.0  # factor of more damping when rounding errors leave no Cholesky factor
SMALL = 256  # triangles up to this size are inverted at once
# Channels whose products are kept: memory grows with their square, and time with its cube.
MOST_CHANNELS, CHANNELS_STEP = 4096, 256
TILE_COLUMNS = 32  # columns per tile: their corrections reach the rest of the matrix at once


class Inputs(NamedTuple):
    """Typical inputs of a matrix, as GPTQ takes them."""

    weights: F32  # [K], mean squares of the channels: what an error in each costs
    order: npt.NDArray[np.intp]  # [K], channels by falling weight
    factor: F32  # [K, K], U for channels in this order


def typical_inputs(hessian: F32) -> Inputs:
    """Describe inputs whose sum of x x^T is H [K, K]. Raises ExportError if H is not finite."""
    if not np.isfinite(hessian).all():
        raise ExportError(
            "the calibration text drives hidden states beyond float32; training diverged or the "
            "weights are damaged: export an earlier step, or try --type int8"
        )
    weights = np.diagonal(hessian).copy()
    weights += np.float32(DAMPING * (weights.mean(dtype=np.float64) or 1))
    order = np.argsort(-weights, kind="stable")
    return Inputs(weights, order, inverse_factor(hessian[np.ix_(order, order)]))


def inverse_factor(hessian: F32) -> F32:
    """Return the upper triangular U [K, K] with U^T U = (H + damping)^-1, H [K, K] = sum of x x^T.

    Takes three times the memory of H beside it.
    """
    mean = float(np.diagonal(hessian).mean(dtype=np.float64)) or 1.0
    # Rows and columns are reversed, so that H = L L^T becomes H = R R^T with an upper R. Its
    # inverse is U: one factorization instead of two and an inversion.
    damped = hessian[::-1, ::-1] / np.float32(mean)
    diagonal, damping = np.einsum("kk->k", damped), DAMPING  # a view of the diagonal
    diagonal += np.float32(damping)
    while True:
        try:
            lower = np.linalg.cholesky(damped)
            break
        except np.linalg.LinAlgError:
            diagonal += np.float32(damping * (DAMPING_STEP - 1))
            damping *= DAMPING_STEP
    del damped, diagonal
    return np.ascontiguousarray(_inverse(lower)[::-1, ::-1])


def _inverse(lower: F32) -> F32:
    """Invert a lower triangle [K, K] by halves, which leaves nearly all work to products."""
    size = len(lower)
    if size <= SMALL:
        return np.tril(np.linalg.inv(lower)).astype(np.float32)
    first, second, inverse = slice(0, size // 2), slice(size // 2, size), np.zeros_like(lower)
    inverse[first, first] = _inverse(lower[first, first])
    inverse[second, second] = _inverse(lower[second, second])
    beside = lower[second, first] @ inverse[first, first]
    inverse[second, first] = -inverse[second, second] @ beside
    return inverse


def parts(width: int) -> list[slice]:
    """Cut channels into parts that are corrected for each other: all of them, if they are not many."""
    count = -(-width // MOST_CHANNELS)
    step = -(-width // count // CHANNELS_STEP) * CHANNELS_STEP
    return [slice(start, min(start + step, width)) for start in range(0, width, step)]


def solve(
    matrix: F32, inputs: Sequence[Inputs], bits: int, block: int, *, asymmetric: bool = False
) -> Rounded:
    """Quantize rows [n, K] for these inputs, those of each part of the channels.

    Blocks that training left on a grid of 4 bits are kept. Rows do not depend on each other.
    """
    weights = cut(np.concatenate([part.weights for part in inputs])[None], block)[0]
    scales, zeros, kept = search_scales(cut(matrix, block), bits, weights, asymmetric=asymmetric)
    inverse = reciprocals(scales)
    scales[inverse == 0] = 0
    floats = scales, inverse, zeros, kept.astype(np.float32)
    by_group = _Scales(*(np.ascontiguousarray(each.T) for each in floats))
    codes, first = np.empty(matrix.shape[::-1], np.uint8), 0
    for part in inputs:
        order = first + part.order
        codes[order] = by_group.round(matrix.T[order], order // block, part.factor, bits)
        first += len(order)
    packed = pack_codes(zeros.astype(np.uint8), bits) if asymmetric else None
    return Rounded(pack_codes(np.ascontiguousarray(codes.T), bits), scales, packed)


class _Scales(NamedTuple):
    """Scales of the blocks of a matrix, each [G, n]."""

    scales: F32
    inverse: F32
    zeros: F32
    kept: F32  # 1 for blocks that are rounded as they were before corrections, else 0

    def round(self, exact: F32, groups: npt.NDArray[np.intp], factor: F32, bits: int) -> U8:
        """Return codes of columns [k, n], corrected one after the other by U [k, k].

        groups: block of each column.
        """
        rest, codes = exact.copy(), np.empty(exact.shape, np.uint8)
        for start in range(0, len(exact), TILE_COLUMNS):
            here = slice(start, start + TILE_COLUMNS)
            errors = np.empty_like(rest[here])
            for column, row in enumerate(factor[here, here]):
                at = start + column
                codes[at], stored = self._nearest(groups[at], rest[at], exact[at], bits)
                errors[column] = (rest[at] - stored) / row[column]
                rest[at + 1 : here.stop] -= row[column + 1 :, None] * errors[column]
            rest[here.stop :] -= factor[here, here.stop :].T @ errors
        return codes

    def _nearest(self, group: int, column: F32, exact: F32, bits: int) -> tuple[F32, F32]:
        """Return the codes of a column [n] and the values that they stand for."""
        if self.kept[group].any():
            column = np.where(self.kept[group] != 0, exact, column)
        code = column * self.inverse[group]
        np.rint(code, out=code)
        code += self.zeros[group]
        np.maximum(code, np.float32(0), out=code)
        np.minimum(code, np.float32((1 << bits) - 1), out=code)
        return code, (code - self.zeros[group]) * self.scales[group]
