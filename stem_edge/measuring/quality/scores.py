"""Scores of models on a text, which is cut into documents and windows; every token counts once.

Models are scored side by side. Their logits are computed and dropped piece by piece, because those of
a whole text can be a thousand times its size in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.numerics.distributions import kullback_leibler, log_softmax, positions_at_once
from stem_edge.numerics.quantize import F32, F64, I64
from stem_edge.runtime.text.codec import TextCodec

LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class Documents:
    """Token ids of documents of at least two tokens, and how long their texts are."""

    token_ids: list[list[int]]
    nbytes: int  # in UTF-8
    characters: int

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted: all but the first of each document."""
        return sum(len(ids) - 1 for ids in self.token_ids)

    @property
    def longest(self) -> int:
        """Most tokens of a document before a predicted one: all but the last."""
        return max(len(ids) - 1 for ids in self.token_ids)


@dataclass(frozen=True)
class ScoringTask:
    """Documents to score, and the windows to do it in."""

    text: str
    lines: bool
    documents: Documents
    window: int  # tokens seen at once
    window_asked: int  # greater than window if no document has that many tokens
    stride: int  # tokens between the starts of windows


def make_task(
    bundle: Bundle, text: str, *, lines: bool, window: int | None, stride: int | None
) -> ScoringTask:
    """Split a text and fill in defaults. Raises InputError for what the bundle cannot do."""
    context = bundle.manifest.model.max_context
    asked = min(context, LONGEST_WINDOW) if window is None else window
    if not 0 < asked <= context:
        raise InputError(f"window is {asked} tokens; {bundle.path} takes 1 to {context}")
    step = max(1, asked // 2) if stride is None else stride
    if not 0 < step <= asked:
        raise InputError(f"stride is {step} tokens; expected 1 to {asked}, the window")
    documents = split(bundle, text, lines=lines)
    return ScoringTask(text, lines, documents, min(asked, documents.longest), asked, step)


def split(bundle: Bundle, text: str, *, lines: bool) -> Documents:
    """Split a text into a document for each line that is not blank, or return it as a single one.

    Lines are closed by the end-of-text token, which stands for the line's end: its length counts.
    Raises InputError if there is nothing to predict.
    """
    codec, closing, end = TextCodec(bundle.file(TOKENIZER)), list[int](), ""
    texts = [text]
    if lines:
        texts = [line for line in text.splitlines() if line.strip()]
        closing = list(bundle.manifest.model.eos_ids[:1])
        end = "\n" if closing else ""
    encoded = [(each + end, [*codec.encode(each), *closing]) for each in texts]
    kept = [(each, ids) for each, ids in encoded if each and len(ids) > 1]
    if not kept:
        raise InputError(
            f"the text of {len(text)} characters has too few tokens of {bundle.path} to predict one "
            "from another, expected 2 or more; give a longer text"
        )
    return Documents(
        token_ids=[ids for _, ids in kept],
        nbytes=sum(len(each.encode()) for each, _ in kept),
        characters=sum(len(each) for each, _ in kept),
    )


def read_text(path: Path) -> str:
    """Read a text in UTF-8 and keep its line ends. Raises InputError."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give a file in UTF-8") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 (byte {error.start}: {error.reason}); convert it first"
        ) from error


# (tokens, first) -> logits [n, V] at the positions from `first` on, from an empty context, in pieces,
# each of which must be used before the next one, which may overwrite it.
Logits: TypeAlias = Callable[[list[int], int], Iterator[F32]]


class Window(NamedTuple):
    """Tokens that a model sees at once, and which of its predictions count."""

    start: int  # first token of the document in the window
    stop: int  # one past the last
    first: int  # first position that counts, for its prediction of the next token; all after it do


def windows(tokens: int, window: int, stride: int) -> list[Window]:
    """Return windows over a document that predict every token but the first once.

    Each window starts `stride` tokens after the one before it, so a token is predicted from at least
    window - stride + 1 tokens, or from all before it.
    """
    inputs = tokens - 1  # not the last token, because none comes after it
    starts = range(0, max(1, inputs - window + stride), stride)
    stops = [min(start + window, inputs) for start in starts]
    return [Window(*each) for each in zip(starts, stops, [0, *stops], strict=False)]


class ScoredWindow(NamedTuple):
    """A window of a document, which is scored apart from all others."""

    token_ids: list[int]  # tokens in the window, and the one after the last of them
    first: int  # first position that counts

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted."""
        return len(self.token_ids) - 1 - self.first


def parts(task: ScoringTask) -> Iterator[ScoredWindow]:
    """Yield the windows of all documents, in the order of the text."""
    for ids in task.documents.token_ids:
        for start, stop, first in windows(len(ids), task.window, task.stride):
            yield ScoredWindow(ids[start : stop + 1], first - start)


class Scores(NamedTuple):
    """Predictions of a model, in the order of the text."""

    likelihood: F64  # natural log of the probability of the text's token
    top: I64  # the most probable token


class Scored(NamedTuple):
    """Scores of each source, and what two of them differ by."""

    scores: list[Scores]
    divergence: F64  # KL(second source || first) in nats at each token; empty for a single source


def score(
    part: ScoredWindow, sources: Sequence[Logits], advance: Callable[[int], object]
) -> Scored:
    """Score the tokens of a part; `advance` is called with the number of tokens just done."""
    found, at = list[Scored](), part.first + 1
    for logits in side_by_side([source(part.token_ids[:-1], part.first) for source in sources]):
        came = np.array(part.token_ids[at : at + len(logits[0])])
        found.append(_score_piece(logits, came))
        advance(len(came))
        at += len(came)
    return join(found)


def _score_piece(logits: Sequence[F32], came: I64) -> Scored:
    """Score tokens [n] by the logits [n, V] of each source."""
    rows, scores = np.arange(len(came)), []
    said = [log_softmax(piece) for piece in logits]
    for each in said:
        top = each.argmax(axis=1)
        scores.append(Scores(each[rows, came], top))
    return Scored(scores, kullback_leibler(said[1], said[0]) if len(said) > 1 else np.zeros(0))


def join(found: Sequence[Scored]) -> Scored:
    """Put what was scored apart behind one another."""
    scores = [
        Scores(*map(np.concatenate, zip(*source, strict=True)))
        for source in zip(*(each.scores for each in found), strict=True)
    ]
    return Scored(scores, np.concatenate([each.divergence for each in found]))


def side_by_side(streams: Sequence[Iterator[F32]]) -> Iterator[list[F32]]:
    """Yield the logits of all streams at the same positions, few enough to compute in float64."""
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
