"""Score models on a text that is split into documents and windows; every token counts once.

All models compute a few positions, and then the next few, because logits of a whole text at once
would take a thousand times the memory of the text.
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
from stem_edge.numerics.distributions import divergence, log_softmax, side_by_side
from stem_edge.numerics.quantize import F32, F64, I64
from stem_edge.runtime.text.codec import TextCodec

LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class ScoringTask:
    """Documents of at least two tokens each, and windows to score them in; fields as in Quality."""

    text: str
    lines: bool
    token_ids: list[list[int]]  # of each document
    nbytes: int  # of all documents, in UTF-8
    window: int  # tokens seen at once
    stride: int  # tokens between the starts of windows

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted: all but the first of each document."""
        return sum(len(ids) - 1 for ids in self.token_ids)


def make_task(bundle: Bundle, text: str, *, lines: bool, window: int | None) -> ScoringTask:
    """Split a text into documents; set the window size (None: up to 2048). Raises InputError."""
    context = bundle.manifest.model.max_context
    asked = min(context, LONGEST_WINDOW) if window is None else window
    if not 0 < asked <= context:
        raise InputError(f"window is {asked} tokens; {bundle.path} takes 1 to {context}")
    found = split(bundle, text, lines=lines)
    ids = [each for _, each in found]
    window = min(asked, max(map(len, ids)) - 1)  # nothing comes after the last token
    return ScoringTask(
        text=text,
        lines=lines,
        token_ids=ids,
        nbytes=sum(len(each.encode()) for each, _ in found),
        window=window,
        stride=max(1, window // 2),
    )


def split(bundle: Bundle, text: str, *, lines: bool) -> list[tuple[str, list[int]]]:
    """Return (text, token ids) of each document: each nonblank line, or the whole text.

    With `lines`, the ids of a line end with the end-of-text token, which stands for its line break.
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
    return kept


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


# (tokens, first) -> logits [n, V] of the tokens from position `first` on, computed from an empty
# context. They come in pieces: use a piece before the next one, which may overwrite it.
Logits: TypeAlias = Callable[[list[int], int], Iterator[F32]]


def windows(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return windows of a document of `tokens` tokens; each token but the first is predicted once.

    A window is (start, stop, first): the model sees tokens start..stop - 1 of the document, and its predictions
    count from position `first` on. It has up to `window` tokens, and starts `stride` tokens after the window before
    it. So a token is predicted from at least window - stride + 1 tokens, or from all before it.
    """
    inputs = tokens - 1  # not the last token, because none comes after it
    starts = range(0, max(1, inputs - window + stride), stride)
    stops = [min(start + window, inputs) for start in starts]
    return list(zip(starts, stops, [0, *stops], strict=False))


class Scores(NamedTuple):
    """A model's scores of a text's tokens: arrays with an element for each predicted token."""

    likelihood: F64  # natural log of the probability of the text's token
    top: I64  # the most probable token


def score(
    task: ScoringTask, sources: Sequence[Logits], advance: Callable[[int], object]
) -> tuple[list[Scores], F64]:
    """Return each model's scores, and KL(second model || first model) in nats at each token.

    sources: functions that yield logits; KL is empty for one. advance: called with token counts.
    """
    found, nats = [list[Scores]() for _ in sources], [np.zeros(0, np.float32)]
    for ids in task.token_ids:
        for start, stop, first in windows(len(ids), task.window, task.stride):
            at = first + 1
            for logits in side_by_side([each(ids[start:stop], first - start) for each in sources]):
                came = np.array(ids[at : at + len(logits[0])])
                said = [log_softmax(piece) for piece in logits]
                for each, scores in zip(said, found, strict=True):
                    likelihood = each[np.arange(len(came)), came]
                    scores.append(Scores(likelihood, each.argmax(axis=1)))
                nats += [divergence(logits[1], logits[0])] if len(said) > 1 else []
                advance(len(came))
                at += len(came)
    joined = [Scores(*map(np.concatenate, zip(*each, strict=True))) for each in found]
    return joined, np.concatenate(nats, dtype=np.float64)
