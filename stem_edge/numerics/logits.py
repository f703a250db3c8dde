"""Operations of sampling on logits: penalties, top-k and top-p filters, probabilities.

Largest logits are found without a sort, so a step over 128,256 logits takes well under 1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32, I64

BLOCK = 128  # logits per block; the search for the largest logits uses block maxima
NUCLEUS_BINS = 1 << 12  # a bin is a sixteenth of an octave, so these span 256 octaves
NUCLEUS_SHIFT = 52 - 4  # keeps only the exponent and four bits of a float64
SMALLEST_TEMPERATURE = 1e-30  # float32 cannot divide by less; sampling is greedy long before


def apply_repetition_penalty(logits: F32, seen: Sequence[int], penalty: float) -> None:
    """Make the tokens `seen` less probable, in place (CTRL, arXiv 1909.05858, section 4.1)."""
    ids = np.asarray(seen, np.int64)
    values = logits[ids]
    # Repeated ids write the same value again, so the ids need not be made unique.
    logits[ids] = np.where(values > 0, values / penalty, values * penalty)


def apply_penalties(logits: F32, answer: Sequence[int], presence: float, frequency: float) -> None:
    """Subtract OpenAI's presence + frequency * count from logits of the tokens in `answer`."""
    ids, counts = np.unique(np.asarray(answer, np.int64), return_counts=True)
    logits[ids] -= (presence + frequency * counts).astype(np.float32)


def nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the fewest weights [n], greatest first, whose sum reaches top_p * total.

    Weights are 0 to 1. A histogram over their exponents finds the bin in which the sum is reached, and
    only that bin is sorted.
    """
    bins = np.ascontiguousarray(weights).view(np.int64) >> NUCLEUS_SHIFT  # in the order of weights
    bins -= bins.max() - NUCLEUS_BINS
    np.maximum(bins, 0, out=bins)
    shares = np.bincount(bins, weights, NUCLEUS_BINS + 1)
    above = np.cumsum(shares[::-1])[::-1]  # sum of each bin and all greater ones
    wanted = top_p * above[0]
    last = int(np.flatnonzero(above >= wanted)[-1])
    kept: npt.NDArray[np.bool_] = bins > last
    rest = np.flatnonzero(bins == last)
    rest = rest[np.argsort(-weights[rest], kind="stable")]
    missing = wanted - (above[last] - shares[last])
    kept[rest[: int(np.searchsorted(np.cumsum(weights[rest]), missing)) + 1]] = True
    return kept


def weights_of(logits: F32, peak: np.float32, temperature: float) -> npt.NDArray[np.float64]:
    """Return exp((logits - peak) / temperature) as float64. peak: the greatest logit."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf
        scaled = (logits - peak) / np.float32(max(temperature, SMALLEST_TEMPERATURE))
    return np.asarray(np.exp(scaled), np.float64)


def top_ids(logits: F32, count: int) -> I64:
    """Return the ids of the `count` largest logits [V], best first; ties by ascending id."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(logits):
        # The count-th largest block maximum is a lower bound of the count-th largest logit.
        maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
        values = maxima if count <= len(maxima) else logits
        bound = np.partition(values, len(values) - count)[len(values) - count]
        pool = np.flatnonzero(logits >= bound)
        if bound == -np.inf:  # the backend returned few logits: the others need no sorting
            finite = np.flatnonzero(logits > bound)
            pool = finite if len(finite) >= count else pool
    else:
        pool = np.arange(len(logits))
    order = np.argsort(-logits[pool], kind="stable")
    return np.asarray(pool[order[:count]], np.int64)


def candidates(
    logits: F32,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[I64, npt.NDArray[np.float64]]:
    """Return the ids of the tokens that pass top_k, top_p and min_p, and their probabilities.

    The filters apply in this order. None, 0 and a top_p of 1 turn a filter off. Ids ascend, so a
    filter that removes nothing does not change the sampled token.
    """
    peak = logits.max()
    if top_k:
        ids = np.sort(top_ids(logits, min(top_k, len(logits))))
        weights = weights_of(logits[ids], peak, temperature)
    else:
        ids = np.arange(len(logits))
        weights = weights_of(logits, peak, temperature)
    if top_p and top_p < 1:
        kept = nucleus(weights, top_p)
        ids, weights = ids[kept], weights[kept]
    if min_p:
        kept = weights >= min_p  # the greatest weight is 1
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum()
