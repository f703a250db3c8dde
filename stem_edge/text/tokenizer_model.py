"""Checks a tokenizer's model: its tokens and merges, and the memory to load it.

A file of 64 MiB can describe a model for which the tokenizers library needs gigabytes and minutes, so this module
limits sizes first. It decodes lists in pieces, because whole lists of Python objects need more memory than the library.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from os.path import commonprefix
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from stem_edge.bundle.checked_tokenizer import TokenizerMemory
from stem_edge.text.tokenizer_steps import check_model

MAX_TOKENS = 1 << 19  # twice the largest vocabulary among published models
MAX_MERGES = 3  # for each token; Llama 3 has 2.2
MAX_MERGES_IN_ALL = 3 << 18  # half as many again as Gemma 3, which has most
MAX_PIECES_NBYTES = 4 << 20  # of all tokens of a Unigram model; XLM-R has 2 MB
# Measured with 2,000 to a million tokens: the library takes from 20 % less to 5 % more than this.
NODE_NBYTES = 350
MERGE_NBYTES, MERGE_LOADING_NBYTES = (70, 30), (420, 170)  # as pairs, and as texts

Id = Annotated[int, msgspec.Meta(ge=0)]
# Fields of a model that the library reads. The type comes first, because the library would hold all other fields twice
# until it knows the type.
_FIELDS = (
    *("type", "dropout", "unk_token", "unk_id", "continuing_subword_prefix", "end_of_word_suffix"),
    *("max_input_chars_per_word", "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"),
)
# Not a dict, which would keep the millions of other fields that a file can have.
_Model = msgspec.defstruct("_Model", [(name, msgspec.Raw | UnsetType, UNSET) for name in _FIELDS])

_TEXT, _SPACE = rb'"[^"\\]*(?:\\.[^"\\]*)*"', rb"[ \t\r\n]*"
_COMMA = _SPACE + b"," + _SPACE
_KEY = re.compile(_TEXT + _SPACE + b":", re.DOTALL)
_PAIR = rb"\[" + _SPACE + _TEXT + _COMMA + rb"%b" + _SPACE + rb"\]"
_PIECE_COUNT = 256
_COMMENT = "#version"


def _some(element: bytes) -> re.Pattern[bytes]:
    return re.compile(b"(?:%b%b%b,?){1,%d}" % (_SPACE, element, _SPACE, _PIECE_COUNT), re.DOTALL)


_MERGES = _some(b"(?:" + _TEXT + b"|" + _PAIR % _TEXT + b")")
_PIECES = _some(_PAIR % rb"[-+.0-9eE]+")


def check_tokens(
    raw: msgspec.Raw, added_nbytes: int
) -> tuple[bytes, dict[str, int], TokenizerMemory]:
    """Check a tokenizer's model. Return (new JSON of the model, token -> id, memory it takes).

    Removes dropout, because it makes the ids of a text random. Raises ValueError.
    added_nbytes: bytes of the added tokens' texts, to be included in the memory.
    """
    given = msgspec.structs.asdict(msgspec.json.decode(raw, type=_Model))
    fields = {name: value for name, value in given.items() if value is not UNSET}
    check_model(fields)
    vocab = fields.get("vocab", msgspec.Raw(b"null"))
    nodes = merges = 0
    if bytes(memoryview(vocab)[:1]) == b"[":
        ids = _pieces(vocab)
        nodes = _nodes(ids)
    else:
        ids = _vocabulary(vocab)
        fields["vocab"] = msgspec.Raw(msgspec.json.encode(ids))
    plain = not any(" " in token or token.startswith(_COMMENT) for token in ids)
    if "merges" in fields:
        written, merges = _merges(fields["merges"], ids, plain=plain)
        fields["merges"] = msgspec.Raw(written)
    fields.pop("dropout", None)
    text = 2 * sum(len(token.encode()) for token in ids) + NODE_NBYTES * nodes
    kept = 1_500_000 + 235 * len(ids) + text + MERGE_NBYTES[plain] * merges + 20 * added_nbytes
    loading = 4_000_000 + 400 * len(ids) + text + 95 * added_nbytes
    loading += MERGE_LOADING_NBYTES[plain] * merges
    return msgspec.json.encode(fields), ids, TokenizerMemory(kept, loading)


def _vocabulary(raw: msgspec.Raw) -> dict[str, int]:
    """Map each token to its id. Raises ValueError if a token occurs twice."""
    count = 0
    for count, _ in enumerate(_KEY.finditer(memoryview(raw)), 1):
        _check_count(count)
    ids = msgspec.json.decode(raw, type=dict[str, Id])
    _check_distinct(ids, count)
    return ids


def _pieces(raw: msgspec.Raw) -> dict[str, int]:
    """Map each token of a Unigram model to its id, which is its index in the list."""
    ids, count = dict[str, int](), 0
    for some in _lists(raw, _PIECES, list[tuple[str, float]], "model.vocab"):
        for piece, _ in some:
            ids.setdefault(piece, count)
            count += 1
        _check_count(count)
    _check_distinct(ids, count)
    return ids


def _nodes(pieces: Collection[str]) -> int:
    """Return the number of nodes in the prefix tree (trie) of the tokens. Raises ValueError."""
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


def _check_count(count: int) -> None:
    if count > MAX_TOKENS:
        raise ValueError(
            f"model.vocab has more than {MAX_TOKENS:,} entries, expected at most as many"
        )


def _check_distinct(ids: Mapping[str, int], count: int) -> None:
    if len(ids) != count:
        raise ValueError(f"model.vocab has {count} entries for {len(ids)} tokens, expected as many")
    if not ids:
        raise ValueError("model.vocab is empty, expected tokens")


def _merges(raw: msgspec.Raw, ids: Mapping[str, int], *, plain: bool) -> tuple[bytes, int]:
    """Return BPE merges as JSON for the tokenizers library, and their number. Raises ValueError.

    plain: write merges as "a b"; the library reads ["a", "b"] with twice the memory. Only for vocabularies
    without spaces in tokens, and without tokens that begin with #version: the library skips such merges.
    """
    most = min(MAX_MERGES * len(ids), MAX_MERGES_IN_ALL)
    keys, written = array("Q"), list[bytes]()
    for some in _lists(raw, _MERGES, list[tuple[str, str] | str], "model.merges"):
        own = (m for m in some if not isinstance(m, str) or not m.startswith(_COMMENT))
        pairs = [_pair(merge) for merge in own]
        try:
            keys.extend([ids[first] << 32 | ids[second] for first, second in pairs])
        except KeyError as error:
            raise ValueError(
                f"model.merges has {error.args[0][:80]!r}, which model.vocab lacks"
            ) from None
        if len(keys) > most:
            raise ValueError(
                f"model.merges has more than {most:,} entries for {len(ids):,} tokens, expected at most "
                f"{MAX_MERGES} for each token, and {MAX_MERGES_IN_ALL:,}"
            )
        lines: list[Any] = [" ".join(pair) for pair in pairs] if plain else pairs
        if lines:
            written.append(msgspec.json.encode(lines)[1:-1])
    distinct = len(np.unique(np.frombuffer(keys, np.uint64))) if keys else 0
    if distinct < len(keys):
        raise ValueError(
            f"model.merges has {len(keys)} entries, {distinct} of them distinct, expected each once"
        )
    return b"[" + b",".join(written) + b"]", len(keys)


def _pair(merge: tuple[str, str] | str) -> tuple[str, str]:
    """Return the two tokens of a merge, which is a pair, or in old files a text "a b"."""
    first, *others = merge.split(" ") if isinstance(merge, str) else merge
    if len(others) != 1:
        raise ValueError(f"model.merges has {str(merge)[:80]!r}, expected two tokens")
    return first, others[0]


def _lists(raw: msgspec.Raw, part: re.Pattern[bytes], kind: Any, where: str) -> Iterator[list[Any]]:
    """Decode a JSON list in parts that match `part`, to save memory. where: name for errors."""
    data = memoryview(raw)
    if bytes(data[:1]) != b"[":
        raise ValueError(f"{where} is not a list")
    at, end = 1, len(data) - 1
    while at < end:
        found = part.match(data, at, end)
        if found is None:
            if not bytes(data[at:end]).strip():
                return
            raise ValueError(f"{where} has {bytes(data[at : at + 80])!r}, expected pairs of tokens")
        yield msgspec.json.decode(b"[" + found[0].rstrip(b", \t\r\n") + b"]", type=kind)
        at = found.end()
