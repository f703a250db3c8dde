"""Check of what SentencePiece's tokenizers alone have: a Unigram model's tokens, and a charsmap."""

from __future__ import annotations

import base64
from collections.abc import Collection
from os.path import commonprefix
from typing import Any

import msgspec

from stem_edge.text.tokenizer_lists import PAIR, check_count, check_distinct, lists, some_of

MAX_PIECES_NBYTES = 4 << 20  # of all tokens of a Unigram model; XLM-R has 2 MB
_PIECES = some_of(PAIR % rb"[-+.0-9eE]+")


def pieces_of(raw: msgspec.Raw) -> dict[str, int]:
    """Map each token of a Unigram model to its id, which is its place in the list."""
    ids, count = dict[str, int](), 0
    for some in lists(raw, _PIECES, list[tuple[str, float]], "model.vocab"):
        for piece, _ in some:
            ids.setdefault(piece, count)
            count += 1
        check_count(count)
    check_distinct(ids, count)
    return ids


def nodes_of(pieces: Collection[str]) -> int:
    """Return the nodes of the library's tree of tokens: their distinct beginnings. Raises ValueError."""
    text = sum(len(piece.encode()) for piece in pieces)
    if text > MAX_PIECES_NBYTES:
        raise ValueError(
            f"the tokens of model.vocab have {text:,} bytes, expected at most {MAX_PIECES_NBYTES:,}"
        )
    nodes, last = 0, b""
    for piece in sorted(piece.encode() for piece in pieces):
        nodes += len(piece) - len(commonprefix([last, piece]))  # noqa: RUF071  (not of paths)
        last = piece
    return nodes


def charsmap_growth(charsmap: Any) -> int:
    """Return the longest replacement in a charsmap: a trie, then texts terminated by zeros."""
    message = "normalizer.precompiled_charsmap is {}, expected base64 of a trie and its texts"
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError):
        found = "null" if charsmap is None else "not base64"
        raise ValueError(message.format(found)) from None
    trie_nbytes = int.from_bytes(data[:4], "little")
    if not trie_nbytes or trie_nbytes % 4 or 4 + trie_nbytes > len(data):
        raise ValueError(message.format(f"{len(data)} bytes with a trie of {trie_nbytes}"))
    return max(1, *(len(text) for text in data[4 + trie_nbytes :].split(b"\0")))
