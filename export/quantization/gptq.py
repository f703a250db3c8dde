"""GPTQ (arXiv 2210.17323): rounds a matrix column by column, and corrects the columns that follow.

Let H be the sum of x x^T over typical inputs, L its lower Cholesky factor, and e the rounding errors of a row. The
output error is then |L^T e|^2. Columns are rounded from the last to the first. Before column j is rounded, the errors
of the columns k > j are added to it, times L[k, j] / L[j, j]; this minimizes entry j of L^T e. It is the paper's
method without an inverse (arXiv 2507.18553). Columns with large inputs are rounded first, because the other columns
can then correct their errors. Scales are not changed: they are computed from the blocks of the original matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.errors import ExportError
from stem_edge.numerics.block_search import search_scales
from stem_edge.numerics.quantize import F32, U8
from stem_edge.numerics.quantizing import Rounded, cut, pack_codes, reciprocals

# Share of the mean diagonal of H that is added to the diagonal, because inputs that are not in the
# calibration text occur, too. 0.01, as in the paper, overfits to some thousand tokens: on other
# text, errors of products are 8 % larger (SmolLM2-135M-Instruct).
DAMPING = 0.1
DAMPING_STEP = 10.0  # factor of more damping when rounding errors leave no Cholesky factor
PANEL = 256  # columns factored at once; matrix products update the other columns
# Channels of one Hessian: memory grows with the square of their number, and time with the cube.
MOST_CHANNELS, CHANNELS_STEP = 3072, 256
TILE_COLUMNS = 128  # columns per tile; errors of later tiles are added to the whole tile at once


class Inputs(NamedTuple):
    """Statistics of a matrix's typical inputs, in the form that GPTQ needs."""

    weights: F32  # [K], mean squares of the channels: what an error in each costs
    order: npt.NDArray[np.intp]  # [K], channels by rising weight
    factor: F32  # [K, K], L for channels in this order; only values below the diagonal are used


def typical_inputs(hessian: F32) -> Inputs:
    """Return the statistics of a matrix's inputs x from H [K, K], the sum of x x^T.

    Needs as much memory as H. Raises ExportError if H is not finite.
    """
    weights = np.diagonal(hessian).copy()
    if not np.isfinite(weights).all():  # the diagonal has the greatest values of H
        raise ExportError(
            "the calibration text drives hidden states beyond float32; training diverged or the "
            "weights are damaged: export an earlier step, or try --type int8"
        )
    mean, damping = np.float32(weights.mean(dtype=np.float64) or 1), DAMPING
    weights += np.float32(DAMPING) * mean
    order = np.argsort(weights, kind="stable")
    while True:
        factor = hessian[np.ix_(order, order)]
        factor /= mean
        np.einsum("kk->k", factor)[:] += np.float32(damping)
        try:
            _cholesky(factor)
            break
        except np.linalg.LinAlgError:
            damping *= DAMPING_STEP
    factor /= np.diagonal(factor).copy()
    return Inputs(weights, order, factor)


def _cholesky(matrix: F32) -> None:
    """Replace the lower triangle of a matrix [K, K] by its Cholesky factor L, in place.

    numpy's function takes three times as long for thousands of columns.
    """
    for start in range(0, len(matrix), PANEL):
        here, below = slice(start, start + PANEL), slice(start + PANEL, None)
        panel = matrix[start:, here] - matrix[start:, :start] @ matrix[here, :start].T
        first = np.linalg.cholesky(panel[:PANEL])
        matrix[here, here] = first
        matrix[below, here] = panel[PANEL:] @ np.linalg.inv(first).T


def parts(width: int) -> list[slice]:
    """Divide the input channels of a wide matrix into slices, which GPTQ rounds independently."""
    count = -(-width // MOST_CHANNELS)
    step = -(-width // count // CHANNELS_STEP) * CHANNELS_STEP
    return [slice(start, min(start + step, width)) for start in range(0, width, step)]


def solve(
    matrix: F32, inputs: Sequence[Inputs], bits: int, block: int, *, asymmetric: bool = False
) -> Rounded:
    """Quantize rows [n, K] by GPTQ to codes of `bits` bits.

    inputs: statistics of the inputs, for each slice of channels that parts() returns. block: number
    of values that share a scale. asymmetric: blocks also get a zero point.

    Blocks that hold 4-bit values already, from training for 4 bits, are stored exactly. A row's
    codes do not depend on other rows.
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
    """Scales and zero points of a matrix of n rows with G blocks each. Each array is [G, n].

    inverse: 1 / scales. kept: 1 for blocks that are rounded without corrections, else 0.
    """

    scales: F32
    inverse: F32
    zeros: F32
    kept: F32

    def round(self, exact: F32, groups: npt.NDArray[np.intp], factor: F32, bits: int) -> U8:
        """Round columns `exact` [k, n] to codes. groups: block of each column.

        factor [k, k]: how a column's rounding error changes the other columns (Inputs.factor).
        """
        lost, codes = np.empty_like(exact), np.empty(exact.shape, np.uint8)
        for start in reversed(range(0, len(exact), TILE_COLUMNS)):
            stop = min(start + TILE_COLUMNS, len(exact))
            wanted = exact[start:stop] + factor[stop:, start:stop].T @ lost[stop:]
            for at in reversed(range(start, stop)):
                column = wanted[at - start] + factor[at + 1 : stop, at] @ lost[at + 1 : stop]
                codes[at], stored = self._nearest(groups[at], column, exact[at], bits)
                np.subtract(exact[at], stored, out=lost[at])
        return codes

    def _nearest(self, group: int, column: F32, exact: F32, bits: int) -> tuple[F32, F32]:
        """Round `column` [n], corrected for the errors of other columns; return codes and values.

        exact: the column without corrections, which replaces it in rows whose block `group` is
        `kept`.
        """
        if self.kept[group].any():
            column = np.where(self.kept[group] != 0, exact, column)
        code = column * self.inverse[group]
        np.rint(code, out=code)
        code += self.zeros[group]
        np.maximum(code, np.float32(0), out=code)
        np.minimum(code, np.float32((1 << bits) - 1), out=code)
        return code, (code - self.zeros[group]) * self.scales[group]
