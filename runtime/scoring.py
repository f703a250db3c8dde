"""Log probabilities of continuations, which most evaluations ask of a model.

Pairs are sorted by their token ids, so that those with a common beginning are neighbours, and one KV
cache serves them all: each pair computes only what differs from the one before. The choices of a
question process its context once, and choices of a single token share everything.

Reuse must not decide which choice wins, so every token is computed in the same way whatever its
neighbours: by the graph for prompts, if that is loaded, and paired with the token beside it, at an
even position and the next (kernels round an unpaired token differently; see engine.starts_of). A sequence
of odd length is padded with its last token; the logits of the padding are not used. With reuse, only
rounding in float32 still differs: with the demo model, logits by up to 4e-6, and in 99 of 100
sequences not at all. Smaller keys and values enlarge this: with float16, choices moved by up to 0.15
nats. So these are reused only where pairs are computed to the same bits (BackendContext.resumes);
float32 ones also where kernels (ggml's, experts') round by the number of tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

import numpy as np

from stem_edge.errors import BackendError, InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.interface import DAMAGED
from stem_edge.runtime.engine import Step, starts_of
from stem_edge.runtime.lookups.lookups import check_text, checked_ids
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import TokenLogprobs, token_logprobs
from stem_edge.runtime.text.codec import same_start
from stem_edge.runtime.texts import run

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation


@dataclass(frozen=True)
class Score:
    """Likelihood of a continuation, and whether it is the greedy choice."""

    logprob: float  # natural logarithm of its probability, given the context
    greedy: bool  # True if each of its tokens is the most probable one


@dataclass(frozen=True, order=True)
class _Request:
    inputs: list[int]  # ids for the model: all but the last token
    targets: list[int]  # the continuation
    number: int  # place of the pair in the order given


class Scorer:
    """Scores pairs with a loaded model; it can be used again and keeps only counts.

    reuse: False processes every pair from its beginning, for comparison; so does True with keys and
    values whose reuse would show in scores, such as float16.
    """

    def __init__(self, model: Model, *, reuse: bool = True) -> None:
        self.processed = 0  # tokens computed so far
        self.reused = 0  # tokens found in the KV cache instead
        self._model, self._engine, self._reuse = model, model.engine, reuse

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Return scores in the order of the pairs; see `scores`."""
        scores = dict(self.scores(pairs))
        return [scores[number] for number in range(len(pairs))]

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Score]]:
        """Yield (number of the pair, its score), in the order of the pairs' token ids.

        A sequence longer than the model's context loses its beginning. A score does not depend on
        the order of the pairs nor, but for rounding, on other pairs. The KV cache is as long as the
        longest pair, and prompts kept for generations give way to it; under a memory limit, no generation
        should run at the same time.

        Raises InputError, before anything is computed, for a context or continuation without
        tokens, a continuation longer than the model's context, ids out of range or not of text, and inside
        Model.edited, because an edit at positions belongs to one prompt while the KV cache serves
        many. While iterating, RowReadError when flash fails and BackendError for logits that are not
        finite.
        """
        if self._model.edits:
            raise InputError(
                "pairs are scored without edits; score them outside Model.edited, or use Model.logits"
            )
        return self._run([self._request(number, *pair) for number, pair in enumerate(pairs)])

    def _request(
        self, number: int, context: Sequence[int], continuation: Sequence[int]
    ) -> _Request:
        self._engine.check_usable()
        holds = self._model.plan.context_length
        if not len(context):
            raise InputError(f"pair {number}: the context is empty; give at least a begin token")
        if not 0 < len(continuation) <= holds:
            raise InputError(
                f"pair {number}: the continuation has {len(continuation)} tokens; expected 1 to "
                f"{holds}, which is what the context holds"
            )
        ids = checked_ids([*context, *continuation], self._model.config.vocab_size)
        check_text(self._model.config, ids)
        return _Request(ids[-holds - 1 : -1], ids[-len(continuation) :], number)

    def _run(self, requests: list[_Request]) -> Iterator[tuple[int, Score]]:
        longest = max((len(request.inputs) for request in requests), default=0)
        with self._model.empty_context(longest + longest % 2) as context:
            held: list[int] = []  # ids in the KV cache
            for inputs, group in groupby(sorted(requests), key=lambda request: request.inputs):
                alike = list(group)
                padded = inputs + inputs[-1:] * (len(inputs) % 2)
                first = len(inputs) - max(len(request.targets) for request in alike)
                first -= first % 2
                # Entries after the position are overwritten, so the KV cache needs no clearing.
                shared = min(same_start(held, padded) // 2 * 2, first)
                context.rewind(shared if self._reuses(context, len(padded)) else 0)
                self.processed += len(padded) - context.position
                self.reused += context.position
                scores = _sum_up(self._steps(context, padded, first), len(inputs), alike)
                held = padded
                yield from zip((request.number for request in alike), scores, strict=True)

    def _reuses(self, context: Context, tokens: int) -> bool:
        exact = context.backend.resumes(tokens) == "pairs"
        return self._reuse and (exact or self._model.plan.kv == "fp32")

    def text(self, token_ids: Sequence[int], top: int) -> Iterator[list[TokenLogprobs]]:
        """Yield log probabilities of each token of a text but the first, a step's at a time.

        `scores` sums these up. top: also give this many most probable tokens. Raises InputError for
        fewer than two ids, ids out of range, or more than the context holds.
        """
        request = self._request(0, token_ids[:1], token_ids[1:])
        inputs, targets = request.inputs, request.targets
        padded = inputs + inputs[-1:] * (len(inputs) % 2)
        with self._model.empty_context(len(padded)) as context:
            for first, logits in self._steps(context, padded, 0):
                rows = zip(logits, targets[first:], strict=False)
                yield [token_logprobs(row, target, top) for row, target in rows]

    def _steps(self, context: Context, ids: list[int], first: int) -> Iterator[tuple[int, F32]]:
        """Process ids that the context lacks; yield (position of the first, logits [n, V]) of steps."""
        size, most = self._engine.chunk_tokens, self._engine.logit_tokens
        if len(ids) - first > most:
            size = most
        held, tokens = context.position, np.array(ids, np.int64)
        looked_up = self._engine.rows.ids(tokens)
        starts = [held + at for at in starts_of(len(ids) - held, size)]
        steps = [
            Step(tokens[at:end], looked_up[at:end], min(end - at, max(0, end - first)))
            for at, end in pairwise([*starts, len(ids)])
        ]
        for logits in run(self._engine, context, steps, prefill=True):
            yield context.position - len(logits), logits


def _sum_up(
    steps: Iterator[tuple[int, F32]], length: int, alike: Sequence[_Request]
) -> list[Score]:
    """Score continuations with the same `length` input ids, from the logits of steps."""
    sums, greedy = [0.0] * len(alike), [True] * len(alike)
    for position, row in chain.from_iterable(enumerate(rows, start) for start, rows in steps):
        if position == length:  # the padding of an odd length
            continue
        best = int(row.argmax())  # of the first NaN, if any
        peak = row[best]
        total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
        if not np.isfinite(total):
            raise BackendError(
                f"the logit of token {best} is {peak}, expected a finite number; {DAMAGED}"
            )
        for number, request in enumerate(alike):
            at = position - length + len(request.targets)
            if at >= 0:
                sums[number] += float(row[request.targets[at]]) - total
                greedy[number] &= request.targets[at] == best
    return [Score(*pair) for pair in zip(sums, greedy, strict=True)]
