"""A text as the documents that a model is asked to predict, and in windows of which size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stem_edge.bundle import TOKENIZER, Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.text import TextCodec

LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class Documents:
    """Token ids of documents of at least two tokens, and how long their texts are."""

    token_ids: list[list[int]]
    nbytes: int  # in UTF-8
    characters: int

    @property
    def predicted(self) -> int:
        """Tokens that another token comes before."""
        return sum(len(ids) - 1 for ids in self.token_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest document that another token comes after."""
        return max(len(ids) - 1 for ids in self.token_ids)


@dataclass(frozen=True)
class Task:
    """What is to be scored, and how."""

    text: str
    lines: bool
    documents: Documents
    window: int  # tokens seen at once
    window_asked: int  # greater if no document has that many
    stride: int  # tokens between the starts of windows


def make_task(
    bundle: Bundle, text: str, *, lines: bool, window: int | None, stride: int | None
) -> Task:
    """Fill in defaults; raises InputError for what the bundle cannot do."""
    context = bundle.manifest.model.max_context
    asked = min(context, LONGEST_WINDOW) if window is None else window
    if not 0 < asked <= context:
        raise InputError(f"window is {asked} tokens; {bundle.path} takes 1 to {context}")
    step = max(1, asked // 2) if stride is None else stride
    if not 0 < step <= asked:
        raise InputError(f"stride is {step} tokens; expected 1 to {asked}, the window")
    documents = split(bundle, text, lines=lines)
    return Task(text, lines, documents, min(asked, documents.longest), asked, step)


def split(bundle: Bundle, text: str, *, lines: bool) -> Documents:
    """One document, or one a line that is not blank, closed by the end-of-text token.

    A line counts with its end, for which that token stands. Raises InputError when there is nothing
    to predict.
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
    """A file as it is, line ends included. Raises InputError."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give a file in UTF-8") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 (byte {error.start}: {error.reason}); convert it first"
        ) from error
