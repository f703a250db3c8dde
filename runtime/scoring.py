"""Log probabilities of continuations, which is what most evaluations ask of a model.

Pairs are sorted by their token ids, so that those with the same beginning meet, and one KV cache
serves all: of each pair only what differs from the one before is computed. The choices of one
question process its context once, and choices of a single token share everything.

Reuse must not decide which choice wins, so every token is computed in one way, whatever stands
beside it: by the graph for prompts, if that is loaded, and as one of the two tokens of an even
position and the next (kernels take tokens in pairs and round one that is left alone differently;
see `cut` of the engine). A sequence of odd length is closed by its last token once more, whose
logits nobody reads. What is left to differ with and without reuse is rounding in float32: with the
demo model, logits by up to 4e-6, and in all but one of a hundred sequences by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from stem_edge.errors import BackendError, InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.engine import Context, cut
from stem_edge.runtime.model import Model
from stem_edge.runtime.text.codec import same_start

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation
# Logits of so many bytes at a time, beside what the memory plan counts: chunks get smaller where
# a long continuation meets a large vocabulary.
LOGITS_NBYTES = 32 << 20


@dataclass(frozen=True)
class Score:
    """What a model thinks of a continuation."""

    logprob: float  # natural logarithm of its probability, given the context
    greedy: bool  # whether each of its tokens is the most probable one


@dataclass(frozen=True, order=True)
class _Asked:
    inputs: list[int]  # what the model is given: all but the last token
    targets: list[int]  # the continuation
    number: int  # of the pair, as it was given


class Scorer:
    """Scores pairs with a loaded model. Use it as often as you like; it keeps nothing but counts.

    reuse: False processes every pair from its beginning, for comparing.
    """

    def __init__(self, model: Model, *, reuse: bool = True) -> None:
        self.processed = 0  # tokens computed so far
        self.reused = 0  # tokens that were found in the KV cache instead
        self._model, self._engine, self._reuse = model, model.engine, reuse

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Scores in the order of the pairs; see `scores`."""
        scores = dict(self.scores(pairs))
        return [scores[number] for number in range(len(pairs))]

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Score]]:
        """(number of the pair, its score), one by one in the order of their token ids.

        Of a sequence longer than the context of the model the beginning is left out. A score does
        not depend on the order of the pairs, nor, but for rounding, on the other pairs. Takes a
        KV cache for the longest of them; no generation should run meanwhile under a memory limit.

        Raises InputError, before anything is computed, for a context or continuation without
        tokens, a continuation longer than the context of the model, or ids out of range, and within
        Model.edited: an edit at positions is of one prompt, and a KV cache serves many; then
        RowReadError when flash fails, BackendError for logits that are no numbers.
        """
        if self._model.edits:
            raise InputError(
                "scores are of the model without edits; leave the context of Model.edited, or take "
                "Model.logits"
            )
        return self._run([self._asked(number, *pair) for number, pair in enumerate(pairs)])

    def _asked(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> _Asked:
        holds = self._model.plan.context_length
        if self._model._closed:
            raise InputError("this model is closed; load it again")
        if not len(context):
            raise InputError(f"pair {number}: the context is empty; give at least a begin token")
        if not 0 < len(continuation) <= holds:
            raise InputError(
                f"pair {number}: the continuation has {len(continuation)} tokens; expected 1 to "
                f"{holds}, which is what the context holds"
            )
        ids = self._model._checked([*context, *continuation])
        return _Asked(ids[-holds - 1 : -1], ids[-len(continuation) :], number)

    def _run(self, asked: list[_Asked]) -> Iterator[tuple[int, Score]]:
        longest = max((len(one.inputs) for one in asked), default=0)
        context = self._engine.open_context(longest + longest % 2)
        held: list[int] = []  # ids in the KV cache
        for inputs, group in groupby(sorted(asked), key=lambda one: one.inputs):
            alike = list(group)
            padded = inputs + inputs[-1:] * (len(inputs) % 2)
            first = len(inputs) - max(len(one.targets) for one in alike)
            first -= first % 2
            # What lies behind the position is dead, and overwritten: the KV cache needs no cleaning.
            context.position = min(same_start(held, padded) // 2 * 2, first) if self._reuse else 0
            self.processed += len(padded) - context.position
            self.reused += context.position
            scores = _sum_up(self._logits(context, padded, first), len(inputs), alike)
            held = padded
            yield from zip((one.number for one in alike), scores, strict=True)

    def _logits(self, context: Context, ids: list[int], first: int) -> Iterator[tuple[int, F32]]:
        """Process what the context lacks of ids; yields (position, logits [V]) from `first` on."""
        most = max(LEAST_CHUNK, LOGITS_NBYTES // (4 * self._model.config.vocab_size))
        size = self._engine.chunk_tokens
        if len(ids) - first > most:
            size = min(size, most)
        chunks = cut(np.asarray(ids[context.position :], np.int64), size)
        self._engine.expect(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            end = context.position + len(chunk)
            wanted = min(len(chunk), max(0, end - first))
            logits = self._engine.step(context, chunk, wanted, following, prefill=True)
            yield from enumerate(logits, end - wanted)


def _sum_up(logits: Iterator[tuple[int, F32]], length: int, alike: Sequence[_Asked]) -> list[Score]:
    """Scores of continuations that end at the same `length` of inputs, from (position, logits)."""
    sums, greedy = [0.0] * len(alike), [True] * len(alike)
    for position, row in logits:
        if position == length:  # the token that closes a pair
            continue
        best = int(row.argmax())  # the first NaN, if there is one
        peak = row[best]
        total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
        if not np.isfinite(total):
            raise BackendError(f"the logit of token {best} is {peak}; the weights are damaged")
        for number, one in enumerate(alike):
            at = position - length + len(one.targets)
            if at >= 0:
                sums[number] += float(row[one.targets[at]]) - total
                greedy[number] &= one.targets[at] == best
    return [Score(*pair) for pair in zip(sums, greedy, strict=True)]
