"""Checks a tokenizer.json before the tokenizers library reads it.

The library trusts the numbers in the file, and some make it abort the process. It gets newly encoded JSON, so that
it cannot read anything else than what was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from stem_edge.bundle.checked_tokenizer import CheckedTokenizer
from stem_edge.errors import BundleError
from stem_edge.files.plain_files import read_plain
from stem_edge.limits import MAX_VOCAB
from stem_edge.shown import printable
from stem_edge.text.tokenizer_model import check_tokens
from stem_edge.text.tokenizer_steps import KINDS, check_steps

MAX_NBYTES = 64 << 20  # twice the largest among published models
MAX_ADDED = 1 << 15
MAX_TOKEN_CHARS = 1 << 12
MAX_ADDED_NBYTES = 1 << 20  # of added tokens together; Gemma 3 has 6,400, with 0.1 MB
# Limit for each part except the model: a JSON value of 2 bytes may take 60 bytes in Python.
MAX_VALUES = 1 << 19
MAX_PART_NBYTES = {"added_tokens": 16 << 20, "normalizer": 12 << 20}
MAX_OTHER_PART_NBYTES = 1 << 20

Id = Annotated[int, msgspec.Meta(ge=0)]
Content = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_CHARS)]
Step = dict[str, Any] | None
NULL = msgspec.Raw(b"null")


class AddedToken(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False):
    """A token that is split off before the tokenizer's model splits the rest of a text."""

    id: Id
    content: Content
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerFile(msgspec.Struct, forbid_unknown_fields=True):
    model: msgspec.Raw
    version: Literal["1.0"] = "1.0"
    truncation: msgspec.Raw = NULL
    padding: msgspec.Raw = NULL
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    normalizer: msgspec.Raw = NULL
    pre_tokenizer: msgspec.Raw = NULL
    post_processor: msgspec.Raw = NULL
    decoder: msgspec.Raw = NULL


Added = Annotated[list[AddedToken], msgspec.Meta(max_length=MAX_ADDED)]


def check_tokenizer(path: Path, vocab_size: int | None = None) -> CheckedTokenizer:
    """Check the tokenizer.json of a model with `vocab_size` token ids. Raises BundleError.

    Ids must be from 0 to vocab_size - 1, each for one token. Some ids may have no token, because a
    model's embedding can have more rows than its tokenizer has tokens.
    """
    data = read_plain(path, MAX_NBYTES, "tokenizer")
    try:
        return check_json(data, vocab_size or MAX_VOCAB)
    except (ValueError, RecursionError) as error:  # errors of msgspec and of UTF-8 are ValueErrors
        reason = " ".join(str(error).split())[:500]
        raise BundleError(
            f"{path}: not a tokenizer.json ({printable(reason)}); export the bundle again"
        ) from None


def check_json(data: bytes, vocab_size: int = MAX_VOCAB) -> CheckedTokenizer:
    """Check the bytes of a tokenizer.json like check_tokenizer. Raises ValueError, RecursionError.

    Removes padding and truncation. Also removes dropout, because it makes the ids of a text random.
    """
    if len(data) > MAX_NBYTES:
        raise ValueError(f"larger than {MAX_NBYTES:,} bytes")
    file = msgspec.json.decode(data, type=TokenizerFile)
    added = _decoded(file, "added_tokens", Added)
    steps = {name: _decoded(file, name, Step) for name in KINDS}
    nbytes = check_added([token.content for token in added])
    model, ids, memory = check_tokens(file.model, nbytes)
    for token in added:
        if ids.setdefault(token.content, token.id) != token.id:
            raise ValueError(
                f"the token {token.content!r} has the ids {ids[token.content]} and {token.id}, "
                "expected one id"
            )
    _check_ids(ids, vocab_size)
    growth = check_steps(steps, vocab_size)
    file.model = msgspec.Raw(model)
    file.truncation = file.padding = NULL
    for name in KINDS:
        setattr(file, name, msgspec.Raw(msgspec.json.encode(steps[name])))
    file.added_tokens = msgspec.Raw(msgspec.json.encode(added))
    return CheckedTokenizer(
        msgspec.json.encode(file),
        max(len(token.encode()) for token in ids),
        growth,
        tuple(token.content for token in added if token.special),
        b'"ByteLevel"' in bytes(file.decoder),
        memory,
    )


def _decoded(file: TokenizerFile, name: str, kind: Any) -> Any:
    """Decode the field `name` of the file as type `kind`. Raises ValueError if it is too large."""
    raw: msgspec.Raw = getattr(file, name)
    most = MAX_PART_NBYTES.get(name, MAX_OTHER_PART_NBYTES)
    if len(raw) > most:
        raise ValueError(f"{name} has {len(raw):,} bytes, expected at most {most:,}")
    data = bytes(raw)
    if (values := sum(map(data.count, (b"[", b"{", b",")))) > MAX_VALUES:
        raise ValueError(f"{name} has some {values:,} values, expected at most {MAX_VALUES:,}")
    return msgspec.json.decode(raw, type=kind)


def _check_ids(ids: Mapping[str, int], vocab_size: int) -> None:
    token = max(ids, key=ids.__getitem__)
    if ids[token] >= vocab_size:
        raise ValueError(
            f"the token {token[:80]!r} has the id {ids[token]}, expected 0 to {vocab_size - 1}"
        )
    if len(np.unique(np.fromiter(ids.values(), np.int64, len(ids)))) < len(ids):
        by_id = {number: token for token, number in ids.items()}
        token, number = next(item for item in ids.items() if by_id[item[1]] != item[0])
        raise ValueError(
            f"{token[:80]!r} and {by_id[number][:80]!r} both have id {number}, expected one token"
        )
    check_lengths(ids)


def check_added(tokens: Sequence[str]) -> int:
    """Return how many bytes added tokens have. Raises ValueError for too many tokens or bytes."""
    if len(tokens) > MAX_ADDED:
        raise ValueError(f"{len(tokens):,} added tokens, expected at most {MAX_ADDED:,}")
    if (nbytes := sum(len(token.encode()) for token in tokens)) > MAX_ADDED_NBYTES:
        raise ValueError(
            f"the added tokens have {nbytes:,} bytes, expected at most {MAX_ADDED_NBYTES:,}"
        )
    return nbytes


def check_lengths(tokens: Iterable[str]) -> None:
    """Raise ValueError if a token has too many characters."""
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARS:
        raise ValueError(
            f"a token has {len(longest)} characters ({longest[:20]!r}...), expected at most "
            f"{MAX_TOKEN_CHARS}"
        )
