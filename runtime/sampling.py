"""From logits to the next token.

`SamplingParams` is what a user sets; `make_sampler` turns it into one function. Greedy is the
default and the trivial case. The filters work on the few largest logits, found exactly and without
sorting the vocabulary, so that a step over 128,256 logits stays well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError, InputError
from stem_edge.quantize import F32

I64 = npt.NDArray[np.int64]
Sampler = Callable[[F32, Sequence[int]], int]

BLOCK = 128  # logits whose maximum stands for them while candidates are looked for
NUCLEUS_BINS = 1 << 12  # a bin is a sixteenth of an octave, so these span 256 octaves
NUCLEUS_SHIFT = 52 - 4  # drops all but the exponent and four bits of a float64
SMALLEST_TEMPERATURE = 1e-30  # below, float32 cannot divide by it; greedy long before


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams, for functions that take them as keywords."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: Sequence[str]
    seed: int | None
    logprobs: int | None


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises InputError for values out of range."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy: always the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest most probable tokens that reach this probability
    min_p: float = 0.0  # keep tokens at least this probable, relative to the most probable one
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen before; 1 is off
    stop: Sequence[str] = ()  # texts that end the generation; they are not part of its text
    seed: int | None = None  # None: different every time; the same seed gives the same text
    logprobs: int | None = None  # report this many most probable tokens at each step

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "stop": (_are_texts(self.stop), "a list of texts, none empty"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more"),
        }
        for field in fields(self):
            fits, expected = ranges[field.name]
            if not fits:
                value = getattr(self, field.name)
                raise InputError(f"{field.name} is {value!r}; expected {expected}")


def _are_texts(stop: object) -> bool:
    many = isinstance(stop, Sequence) and not isinstance(stop, str | bytes)
    return many and all(isinstance(text, str) and text for text in stop)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable (token id, logprob), best first


def make_sampler(params: SamplingParams) -> Sampler:
    """A function from logits [V] and the ids so far to the next id. It may change the logits.

    The function raises BackendError for logits of which none is finite.
    """
    penalize = params.repetition_penalty != 1.0
    generator = np.random.default_rng(params.seed)

    def choose(logits: F32, seen: Sequence[int]) -> int:
        if penalize and len(seen):
            apply_repetition_penalty(logits, seen, params.repetition_penalty)
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise BackendError(
                f"the logit of token {best} is {logits[best]}; the weights are damaged"
            )
        if params.temperature == 0:
            return best
        ids, probabilities = candidates(logits, params)
        # One uniform number a token, whatever the filters keep: a seed means the same text.
        sums = np.cumsum(probabilities)
        return int(ids[np.searchsorted(sums, generator.random() * sums[-1], side="right")])

    return choose


def apply_repetition_penalty(logits: F32, seen: Sequence[int], penalty: float) -> None:
    """Make tokens seen before less probable (CTRL, arXiv 1909.05858, section 4.1)."""
    ids = np.asarray(seen, np.int64)
    values = logits[ids]
    # Repeated ids write the same value again, so that nothing has to be made unique.
    logits[ids] = np.where(values > 0, values / penalty, values * penalty)


def candidates(logits: F32, params: SamplingParams) -> tuple[I64, npt.NDArray[np.float64]]:
    """The ids that survive top_k, top_p and min_p, and their probabilities.

    The filters apply in this order, each to what the one before kept, at the given temperature.
    Ids are ascending, so that filters which keep everything change no choice.
    """
    peak, temperature = logits.max(), params.temperature
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
    """Which weights [n] are the fewest greatest that reach the share `top_p` of their sum.

    Weights are 0 to 1. A histogram over their exponents finds the bin in which the share is
    reached; only that bin is sorted.
    """
    bins = np.ascontiguousarray(weights).view(np.int64) >> NUCLEUS_SHIFT  # ordered as the weights
    bins -= bins.max() - NUCLEUS_BINS
    np.maximum(bins, 0, out=bins)
    shares = np.bincount(bins, weights, NUCLEUS_BINS + 1)
    above = np.cumsum(shares[::-1])[::-1]  # of each bin and all greater ones
    wanted = top_p * above[0]
    last = int(np.flatnonzero(above >= wanted)[-1])
    kept: npt.NDArray[np.bool_] = bins > last
    rest = np.flatnonzero(bins == last)
    rest = rest[np.argsort(-weights[rest], kind="stable")]
    missing = wanted - (above[last] - shares[last])
    kept[rest[: int(np.searchsorted(np.cumsum(weights[rest]), missing)) + 1]] = True
    return kept


def _weights(logits: F32, peak: np.float32, temperature: float) -> npt.NDArray[np.float64]:
    """exp((logit - greatest) / temperature); in float32 where that is exact enough to sum up."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the greatest to -inf
        scaled = (logits - peak) / np.float32(max(temperature, SMALLEST_TEMPERATURE))
    return np.asarray(np.exp(scaled), np.float64)


def top_ids(logits: F32, count: int) -> I64:
    """Ids of the `count` largest logits [V], best first; equal logits by ascending id."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(logits):
        # The count-th largest of the block maxima is a lower bound of the count-th largest logit.
        starts = np.arange(0, len(logits), BLOCK)
        maxima = np.maximum.reduceat(logits, starts)
        if count <= len(maxima):
            bound = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
            pool = np.flatnonzero(logits >= bound)
        else:
            pool = np.arange(len(logits))
            bound = np.partition(logits, len(logits) - count)[len(logits) - count]
            pool = pool[logits >= bound]
    else:
        pool = np.arange(len(logits))
    order = np.argsort(-logits[pool], kind="stable")
    return np.asarray(pool[order[:count]], np.int64)


def token_logprobs(logits: F32, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of the chosen token and of the `count` most probable ones."""
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = (
        tuple((int(i), float(logits[i]) - log_total) for i in top_ids(logits, count))
        if count
        else ()
    )
    return TokenLogprobs(token_id, float(logits[token_id]) - log_total, top)
