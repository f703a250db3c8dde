"""Choosing the next token from logits.

`SamplingParams` holds what a user sets; `make_sampler` turns it into one function. Greedy is the
default and the trivial case. The filters find the few largest logits exactly without sorting the
vocabulary, so that a step over 128,256 logits takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError, InputError, UnknownOptionError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import DAMAGED
from stem_edge.text_table import shown

Sampler = Callable[[F32, Sequence[int]], int]

BLOCK = 128  # logits represented by their maximum while the largest are searched for
NUCLEUS_BINS = 1 << 12  # a bin is a sixteenth of an octave, so these span 256 octaves
NUCLEUS_SHIFT = 52 - 4  # keeps only the exponent and four bits of a float64
SMALLEST_TEMPERATURE = 1e-30  # float32 cannot divide by less; sampling is greedy long before
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
# Integer ends mean whole numbers only. Temperature and penalty have ends because float32 cannot
# divide by what is beyond.
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2**31 - 1),
    "temperature": (0.0, 1e6),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 1024),
}
OPTIONAL = ("seed", "logprobs")
MOST_NEEDED = 1024  # finding more of the largest takes a device longer than sending all logits


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
    """Options for choosing tokens and for stopping. Raises InputError for values out of range."""

    max_new_tokens: int = 128
    # 0 always takes the most probable token. None: 1 with top_k, top_p or min_p, otherwise 0.
    temperature: float | None = None
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest tokens, most probable first, that reach this sum
    min_p: float = 0.0  # keep tokens with at least this share of the highest probability
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen before; 1 disables it
    stop: Sequence[str] = ()  # one or more texts that end the generation; left out of its text
    seed: int | None = None  # None: different each time; equal seeds give equal texts
    logprobs: int | None = None  # report this many of the most probable tokens per step

    def __post_init__(self) -> None:
        if self.temperature is None:
            filtered = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
            object.__setattr__(self, "temperature", 1.0 if filtered else 0.0)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not (_in_range(value, least, most) or (value is None and name in OPTIONAL)):
                kind = "a whole number" if isinstance(most, int) else "a number"
                raise _refused(name, value, f"{kind} from {least} to {most}")
        if self.top_p == 0:
            raise _refused("top_p", self.top_p, "a number above 0, up to 1.0")
        if not _are_texts(self.stop):
            raise _refused(
                "stop",
                self.stop,
                f"a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters",
            )

    def sampler(self) -> Sampler:
        """Make the function that chooses the tokens of one answer; see make_sampler."""
        return make_sampler(self)


def params_of(params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
    """Return the params given, or those made of single options. Raises InputError."""
    if params is not None and options:
        raise InputError("give either params or single options, not both")
    if unknown := options.keys() - SamplingOptions.__annotations__.keys():
        known = ", ".join(SamplingOptions.__annotations__)
        raise UnknownOptionError(f"there is no option {min(unknown)}; expected some of {known}")
    return params or SamplingParams(**options)


def _in_range(value: object, least: float, most: float) -> bool:
    """Return whether a value is a number in range: an int if the ends are, and never a bool."""
    wanted = Integral if isinstance(most, int) else Real
    if not isinstance(value, wanted) or isinstance(value, bool):
        return False
    return bool(least <= value <= most)  # type: ignore[operator]  # Real has no order


def _are_texts(stop: object) -> bool:
    if not isinstance(stop, Sequence) or isinstance(stop, str | bytes) or len(stop) > MAX_STOPS:
        return False
    return all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in stop)


def _refused(name: str, value: object, expected: str) -> InputError:
    return InputError(f"{name} is {shown(value)}; expected {expected}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable (token id, logprob), best first


def make_sampler(params: SamplingParams) -> Sampler:
    """Make a function from logits [V] and the ids so far to the next id; it may change the logits.

    The function raises BackendError if the largest logit is not finite.
    """
    penalize = params.repetition_penalty != 1.0
    generator = np.random.default_rng(params.seed)

    def choose(logits: F32, seen: Sequence[int]) -> int:
        if penalize and len(seen):
            apply_repetition_penalty(logits, seen, params.repetition_penalty)
        best = int(logits.argmax())  # of the first NaN, if any
        if not np.isfinite(logits[best]):
            raise BackendError(
                f"the logit of token {best} is {logits[best]}, expected a finite number; {DAMAGED}"
            )
        if params.temperature == 0:
            return best
        ids, probabilities = candidates(logits, params)
        # Draw one uniform number per token, whatever the filters keep, so that seeds stay in step.
        sums = np.cumsum(probabilities)
        return int(ids[np.searchsorted(sums, generator.random() * sums[-1], side="right")])

    return choose


def needed_logits(params: SamplingParams) -> int:
    """Count of the largest logits that sampling needs, so that others may be -inf; 0: all of them.

    Log probabilities, and top_p and min_p without top_k, are relative to the sum over all tokens. A
    repetition penalty can push any token below one that was smaller.
    """
    if params.repetition_penalty != 1.0 or params.logprobs is not None:
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

    Weights are 0 to 1. A histogram over their exponents finds the bin in which the share is
    reached, and only that bin is sorted.
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
