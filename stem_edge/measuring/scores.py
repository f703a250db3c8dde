"""How well models predict the tokens of texts: each token once, by all models side by side.

Logits are asked for and dropped piece by piece: those of a whole text can be a thousand times its
size in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stem_edge.distributions import kullback_leibler, log_softmax, positions_at_once
from stem_edge.measuring.documents import Task
from stem_edge.quantize import F32, F64, I64


class LogitSource(Protocol):
    """A model that is asked for logits."""

    def logits(self, token_ids: list[int], first: int) -> Iterator[F32]:
        """Logits [n, V] of positions first, first + 1, ... from an empty context, in pieces.

        The next piece may overwrite the last one.
        """


@dataclass(frozen=True)
class Window:
    """Tokens that a model sees at once, and those of its predictions that count."""

    start: int  # first token of the document that goes in
    stop: int  # one past the last
    first: int  # first position whose prediction, of the token after it, counts; all others follow


def windows(tokens: int, window: int, stride: int) -> list[Window]:
    """Windows over a document: every token but the first is predicted once.

    Each window starts `stride` tokens after the one before. So a token is predicted from at least
    window - stride + 1 tokens, or from all before it.
    """
    inputs = tokens - 1  # nothing comes after the last token
    starts = range(0, max(1, inputs - window + stride), stride)
    stops = [min(start + window, inputs) for start in starts]
    return [Window(*each) for each in zip(starts, stops, [0, *stops], strict=False)]


class Scores:
    """What one model said at each of `count` predictions, in the order of the text."""

    def __init__(self, count: int) -> None:
        self.likelihood: F64 = np.zeros(count)  # natural log of the probability of what came
        self.top: I64 = np.zeros(count, np.int64)  # the most probable token
        self.top_probability: F64 = np.zeros(count)

    def put(self, at: int, log_probabilities: F64, came: I64) -> None:
        """Enter predictions at, at + 1, ...: log probabilities [n, V] and the tokens [n]."""
        rows, span = np.arange(len(came)), slice(at, at + len(came))
        top = log_probabilities.argmax(axis=1)
        self.likelihood[span] = log_probabilities[rows, came]
        self.top[span] = top
        self.top_probability[span] = np.exp(log_probabilities[rows, top])


@dataclass(frozen=True)
class Measured:
    """Scores of a bundle and, if there is one, of the reference beside it."""

    found: Scores
    expected: Scores | None
    divergence: F64  # KL(reference || bundle) in nats; without a reference empty


def measure(
    task: Task,
    found: LogitSource,
    expected: LogitSource | None,
    advance: Callable[[int], object],
) -> Measured:
    """Score all tokens but the first of each document; advance hears how many are done."""
    count = task.documents.predicted
    sources = [found] if expected is None else [found, expected]
    scores = [Scores(count) for _ in sources]
    divergence, at = np.zeros(0 if expected is None else count), 0
    for ids in task.documents.token_ids:
        for window in windows(len(ids), task.window, task.stride):
            came = np.array(ids[window.first + 1 : window.stop + 1])
            shown, skip = ids[window.start : window.stop], window.first - window.start
            for logits in side_by_side([source.logits(shown, skip) for source in sources]):
                length = len(logits[0])
                said = [log_softmax(piece) for piece in logits]
                for score, log_probabilities in zip(scores, said, strict=True):
                    score.put(at, log_probabilities, came[:length])
                if expected is not None:
                    divergence[at : at + length] = kullback_leibler(said[1], said[0])
                came, at = came[length:], at + length
                advance(length)
    return Measured(scores[0], scores[1] if expected is not None else None, divergence)


def side_by_side(streams: Sequence[Iterator[F32]]) -> Iterator[list[F32]]:
    """The same positions of every stream of logits, few enough to compute with in float64."""
    held = [next(stream) for stream in streams]
    most = positions_at_once(held[0].shape[1])
    while True:
        length = min(most, *map(len, held))
        yield [piece[:length] for piece in held]
        held = [piece[length:] for piece in held]
        for number, stream in enumerate(streams):
            if not len(held[number]):
                following = next(stream, None)
                if following is None:
                    return
                held[number] = following
