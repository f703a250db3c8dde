"""How input channels are balanced for prompts (SmoothQuant, arXiv 2211.10438)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stem_edge.graph.plan import Columns, WeightPlan
from stem_edge.quantize import F32
from stem_edge.reference import Matrix, whole

# Below this, a channel's greatest value over the median channel's is no outlier worth a pass.
OUTLIER = 8.0


class Balances:
    """The factor of each input channel of a product, from what was seen in it and its columns.

    peaks: consumer -> greatest magnitude of every input channel [K], as calibration.observe has them.
    """

    def __init__(self, peaks: Mapping[str, F32], plan: WeightPlan) -> None:
        self._peaks, self._known = peaks, dict[str, F32]()
        self._parts: dict[
            str, list[str]
        ] = {}  # consumer -> its matrices, those of its twin as well
        for item in plan.items:
            if isinstance(item, Columns) and item.consumer:
                self._parts.setdefault(item.consumer, []).extend(item.parts)

    def of(self, consumer: str, tensors: Mapping[str, Matrix]) -> F32:
        """Factors [K]: the square root of peak over column, ones where nothing was seen."""
        if consumer not in self._known:
            self._known = {consumer: self._find(consumer, tensors)}
        return self._known[consumer]

    def _find(self, consumer: str, tensors: Mapping[str, Matrix]) -> F32:
        matrices = [tensors[part] for part in self._parts[consumer]]
        width = matrices[0].shape[1]
        peaks = self._peaks.get(consumer)
        if peaks is None or len(peaks) != width:
            return np.ones(width, np.float32)
        columns = np.maximum.reduce([np.abs(whole(matrix)).max(axis=0) for matrix in matrices])
        known = (peaks > 0) & (columns > 0)
        balance = np.sqrt(np.where(known, peaks, 1) / np.where(known, columns, 1))
        balance = np.where(known, balance, np.median(balance[known]) if known.any() else 1)
        return np.asarray(balance, np.float32)


def worth_balancing(peaks: Mapping[str, F32], plan: WeightPlan) -> tuple[str, ...]:
    """Products without a norm before them in whose inputs outliers were seen."""
    plain = [one for one in plan.items if isinstance(one, Columns) and not one.consumer]
    return tuple(one.name for one in plain if _has_outliers(peaks.get(one.name), one))


def _has_outliers(peaks: F32 | None, item: Columns) -> bool:
    if peaks is None or len(peaks) != item.codes.dims[0]:
        return False
    return bool(peaks.max() > OUTLIER * np.median(peaks))
