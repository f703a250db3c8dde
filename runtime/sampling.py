"""Choosing the next token from logits.

A `Sampler` chooses the tokens of one answer by what a user sets (sampling_params.py). Greedy is the
default and the trivial case. The filters find the few largest logits exactly without sorting the
vocabulary, so that a step over 128,256 logits takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import DAMAGED
from stem_edge.runtime.sampling_params import SamplingParams

Change = Callable[[F32, Sequence[int]], None]  # of logits, by the tokens so far

BLOCK = 128  # logits represented by their maximum while the largest are searched for
NUCLEUS_BINS = 1 << 12  # a bin is a sixteenth of an octave, so these span 256 octaves
NUCLEUS_SHIFT = 52 - 4  # keeps only the exponent and four bits of a float64
SMALLEST_TEMPERATURE = 1e-30  # float32 cannot divide by less; sampling is greedy long before
MOST_NEEDED = 1024  # finding more of the largest takes a device longer than sending all logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable (token id, logprob), best first


class Sampler:
    """Chooses the tokens of one answer, with one random number for each unless it is greedy.

    prompt: tokens of the text that are not the answer's.
    """

    def __init__(self, params: SamplingParams, prompt: int = 0) -> None:
        self._params, self._changes = params, _changes(params, prompt)

    @cached_property
    def _generator(self) -> np.random.Generator:
        return np.random.default_rng(self._params.seed)

    def __call__(self, logits: F32, seen: Sequence[int]) -> int:
        """Return the next token by logits [V], which may change, and the ids so far.

        Raises BackendError if the largest logit is not finite.
        """
        for change in self._changes:
            change(logits, seen)
        best = int(logits.argmax())  # of the first NaN, if any
        if not np.isfinite(logits[best]):
            raise BackendError(
                f"the logit of token {best} is {logits[best]}, expected a finite number; {DAMAGED}"
            )
        if self._params.temperature == 0:
            return best
        ids, probabilities = candidates(logits, self._params)
        # Draw one uniform number per token, whatever the filters keep, so that seeds stay in step.
        sums = np.cumsum(probabilities)
        return int(ids[np.searchsorted(sums, self._generator.random() * sums[-1], side="right")])

    def skip(self) -> None:
        """Leave out a token that is known without; those after it are the ones of the same seed."""
        self._generator.random()


@singledispatch
def sampler_of(params: SamplingParams, prompt: int = 0) -> Sampler:
    """Make the sampler of an answer; kinds of params that choose otherwise register their own."""
    return Sampler(params, prompt)


def _changes(params: SamplingParams, prompt: int) -> list[Change]:
    """Return what changes logits before a token is chosen."""
    found, biases = list[Change](), params.logit_bias
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if params.repetition_penalty != 1:
        found.append(
            lambda logits, seen: apply_repetition_penalty(logits, seen, params.repetition_penalty)
        )
    if presence or frequency:
        found.append(
            lambda logits, seen: apply_penalties(logits, seen[prompt:], presence, frequency)
        )
    if biases:
        ids = np.fromiter(biases.keys(), np.int64, len(biases))
        added = np.fromiter(biases.values(), np.float32, len(biases))

        def add(logits: F32, seen: Sequence[int]) -> None:
            logits[ids] += added

        found.append(add)
    return found


def needed_logits(params: SamplingParams) -> int:
    """Count of the largest logits that sampling needs, so that others may be -inf; 0: all of them.

    Log probabilities, and top_p and min_p without top_k, are relative to the sum over all tokens.
    Penalties and biases can put any token below one that was smaller.
    """
    if _changes(params, 0) or params.logprobs is not None:
        return 0
    if params.temperature == 0:
        return 1
    return params.top_k if params.top_k <= MOST_NEEDED else 0


def apply_repetition_penalty(logits: F32, seen: Sequence[int], penalty: float) -> None:
    """Make tokens seen before less probable (CTRL, arXiv 1909.05858, section 4.1)."""
    ids = np.asarray(seen, np.int64)
    values = logits[ids]
    # Repeated ids write the same value again, so the ids need not be made unique.
    logits[ids] = np.where(values > 0, values / penalty, values * penalty)


def apply_penalties(logits: F32, answer: Sequence[int], presence: float, frequency: float) -> None:
    """Make tokens of the answer less probable: once, and for each time that it has them.

    As OpenAI describes presence_penalty and frequency_penalty.
    """
    ids, counts = np.unique(np.asarray(answer, np.int64), return_counts=True)
    logits[ids] -= (presence + frequency * counts).astype(np.float32)


def candidates(logits: F32, params: SamplingParams) -> tuple[I64, npt.NDArray[np.float64]]:
    """Ids that survive top_k, top_p and min_p, and their probabilities.

    The filters apply in this order, each to what the previous one kept, at the given temperature.
    Ids ascend, so that filters that keep everything change no choice.
    """
    peak, temperature = logits.max(), params.temperature or 0.0
    if params.top_k:
        ids = np.sort(top_ids(logits, min(params.top_k, len(logits))))
        weights = _weights(logits[ids], peak, temperature)
    else:
        ids = np.arange(len(logits))
        weights = _weights(logits, peak, temperature)
    if params.top_p < 1:
        kept = nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p:
        kept = weights >= params.min_p  # the greatest weight is 1
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum()


def nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Mask of the fewest weights [n], greatest first, that reach the share `top_p` of their sum.

    Weights are 0 to 1. A histogram over their exponents finds the bin that reaches the share, and
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


def _weights(logits: F32, peak: np.float32, temperature: float) -> npt.NDArray[np.float64]:
    """Return exp((logit - peak) / temperature), computed in float32 and returned as float64."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf
        scaled = (logits - peak) / np.float32(max(temperature, SMALLEST_TEMPERATURE))
    return np.asarray(np.exp(scaled), np.float64)


def top_ids(logits: F32, count: int) -> I64:
    """Ids of the `count` largest logits [V], best first; equal logits by ascending id."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(logits):
        # The count-th largest block maximum is a lower bound of the count-th largest logit.
        maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
        values = maxima if count <= len(maxima) else logits
        bound = np.partition(values, len(values) - count)[len(values) - count]
        pool = np.flatnonzero(logits >= bound)
        if bound == -np.inf:  # a backend returned only the largest: the others need no sorting
            finite = np.flatnonzero(logits > bound)
            pool = finite if len(finite) >= count else pool
    else:
        pool = np.arange(len(logits))
    order = np.argsort(-logits[pool], kind="stable")
    return np.asarray(pool[order[:count]], np.int64)


def token_logprobs(logits: F32, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of the chosen token and of the `count` most probable ones."""
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = tuple((int(i), float(logits[i]) - log_total) for i in top_ids(logits, count))
    return TokenLogprobs(token_id, float(logits[token_id]) - log_total, top)
