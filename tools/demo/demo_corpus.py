"""Split text files into documents, and hold some of them out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 50  # documents, so 2 %

# A document ends at a blank line after 4,000 to 8,000 characters, otherwise at the last line end up to
# there, otherwise after 8,000 characters.
DOCUMENT = re.compile(r".{4000,8000}?(?:\n\s*\n|\Z)|.{1,8000}(?:\n|\Z)|.{1,8000}", re.DOTALL)


class TextError(Exception):
    """A text is unreadable, empty or too short to train on."""


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and to test with."""

    training: list[str]
    heldout: list[str]


def read_corpus(paths: Iterable[Path]) -> Corpus:
    """Read the documents of all files; every 50th is held out, starting with the first."""
    documents = [document for path in paths for document in split(read_text(path))]
    if len(documents) < 2:
        raise TextError(
            "the text is too short: it is a single document, but one has to be held out"
        )
    training = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY]
    return Corpus(training, documents[::HELD_OUT_EVERY])


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 at byte {error.start}") from error
    if not text.strip():
        raise TextError(f"{path}: the file holds no text")
    return text


def split(text: str) -> list[str]:
    """Split a text into documents of at most 8,000 characters."""
    documents = (match.group().strip() for match in DOCUMENT.finditer(text))
    return [document for document in documents if document]
