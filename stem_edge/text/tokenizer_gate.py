"""Check of a tokenizer.json before the tokenizers library sees it.

The library trusts the numbers, lengths and ids in the file, and some values make it abort the
process. They are bounded here, and unknown kinds of steps are refused by name. The JSON that is
passed on is encoded again, so that two parsers cannot disagree about it. Problems that appear only
in use, such as a regular expression that never ends, are found by a trial in another process:
`TextCodec.probe`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.limits import MAX_VOCAB
from stem_edge.text.tokenizer_steps import check_model, check_steps
from stem_edge.text_table import printable

MAX_NBYTES = 64 << 20  # twice the largest among published models
MAX_ADDED = 1 << 15
MAX_TOKEN_CHARS = 1 << 12
MAX_MERGES = 4  # for each token; Llama 3 has 2.2

Id = Annotated[int, msgspec.Meta(ge=0)]
Content = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_CHARS)]
Step = dict[str, Any] | None
NULL = msgspec.Raw(b"null")

_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:', re.DOTALL)


class AddedToken(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False):
    """Token that is split off a text before the tokenizer's model sees it."""

    id: Id
    content: Content
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerFile(msgspec.Struct, forbid_unknown_fields=True):
    """Top-level object of a tokenizer.json."""

    model: msgspec.Raw
    version: Literal["1.0"] = "1.0"
    truncation: msgspec.Raw = NULL
    padding: msgspec.Raw = NULL
    added_tokens: Annotated[list[AddedToken], msgspec.Meta(max_length=MAX_ADDED)] = []
    normalizer: Step = None
    pre_tokenizer: Step = None
    post_processor: Step = None
    decoder: Step = None


@dataclass(frozen=True)
class CheckedTokenizer:
    """Checked tokenizer.json for the library, with bounds on what it does to a text."""

    json: str
    longest_nbytes: int  # of the longest token in UTF-8
    growth: int  # largest factor by which its steps can lengthen a text
    special_tokens: tuple[str, ...]


def read_tokenizer(path: Path, vocab_size: int | None = None) -> str:
    """Return the checked JSON of a tokenizer.json for the library. Raises BundleError."""
    return check_tokenizer(path, vocab_size).json


def check_tokenizer(path: Path, vocab_size: int | None = None) -> CheckedTokenizer:
    """Check a tokenizer.json for a model with `vocab_size` rows. Raises BundleError.

    Ids must be 0 to vocab_size - 1, each of one token; some may have none, because a model can have
    more rows than its tokenizer has tokens.
    """
    try:
        data = disk.read_file(path, MAX_NBYTES)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); the bundle is incomplete: export it again"
        ) from error
    try:
        return check_json(data, vocab_size or MAX_VOCAB)
    except (ValueError, RecursionError) as error:  # errors of msgspec and of UTF-8 are ValueErrors
        reason = " ".join(str(error).split())[:500]
        raise BundleError(
            f"{path}: not a tokenizer.json ({printable(reason)}); export the bundle again"
        ) from None


def check_json(data: bytes, vocab_size: int = MAX_VOCAB) -> CheckedTokenizer:
    """Check the bytes of a tokenizer.json as check_tokenizer does. Raises ValueError, RecursionError.

    Padding and truncation are removed, and dropout, which makes the ids of a text random.
    """
    if len(data) > MAX_NBYTES:
        raise ValueError(f"larger than {MAX_NBYTES:,} bytes")
    file = msgspec.json.decode(data, type=TokenizerFile)
    model = msgspec.json.decode(file.model, type=dict[str, msgspec.Raw])
    ids = _vocabulary(model)
    for token in file.added_tokens:
        if ids.setdefault(token.content, token.id) != token.id:
            raise ValueError(
                f"the token {token.content!r} has the ids {ids[token.content]} and {token.id}, "
                "expected one id"
            )
    _check_ids(ids, vocab_size)
    check_model(model)
    _check_merges(model, len(ids))
    if "dropout" in model:
        model["dropout"] = NULL
    steps = {name: getattr(file, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    growth = check_steps(steps | {"post_processor": file.post_processor}, vocab_size)
    file.model = msgspec.Raw(msgspec.json.encode(model))
    file.truncation = file.padding = NULL
    return CheckedTokenizer(
        msgspec.json.encode(file).decode(),
        max(len(token.encode()) for token in ids),
        growth,
        tuple(token.content for token in file.added_tokens if token.special),
    )


def _vocabulary(model: Mapping[str, msgspec.Raw]) -> dict[str, int]:
    """Map each token of a model to its id. Raises ValueError unless the file names each once."""
    raw = model.get("vocab", msgspec.Raw(b"null"))
    if bytes(memoryview(raw)[:1]) == b"[":
        pieces = msgspec.json.decode(raw, type=list[tuple[str, float]])
        ids = {piece: number for number, (piece, _) in enumerate(pieces)}
        count = len(pieces)
    else:
        ids = msgspec.json.decode(raw, type=dict[str, Id])
        count = _KEY.subn(b"", memoryview(raw))[1]
    if len(ids) != count:
        raise ValueError(f"model.vocab has {count} entries for {len(ids)} tokens, expected as many")
    if not ids:
        raise ValueError("model.vocab is empty, expected tokens")
    return ids


def _check_merges(model: Mapping[str, msgspec.Raw], tokens: int) -> None:
    """Raise ValueError for more merges than tokens could need: the library takes 0.5 kB for each."""
    raw = model.get("merges", msgspec.Raw(b"[]"))
    merges = msgspec.json.decode(raw, type=list[tuple[str, str] | str])
    distinct = len(set(merges))
    if distinct < len(merges) or distinct > MAX_MERGES * tokens:
        raise ValueError(
            f"model.merges has {len(merges)} entries, {distinct} of them distinct, for {tokens} tokens; "
            f"expected distinct ones, at most {MAX_MERGES} for each token"
        )


def _check_ids(ids: Mapping[str, int], vocab_size: int) -> None:
    token = max(ids, key=ids.__getitem__)
    if ids[token] >= vocab_size:
        raise ValueError(
            f"the token {token[:80]!r} has the id {ids[token]}, expected 0 to {vocab_size - 1}"
        )
    by_id = {number: token for token, number in ids.items()}
    if len(by_id) != len(ids):
        token, number = next(item for item in ids.items() if by_id[item[1]] != item[0])
        raise ValueError(
            f"{token[:80]!r} and {by_id[number][:80]!r} both have id {number}, expected one token"
        )
    longest = max(ids, key=len)
    if len(longest) > MAX_TOKEN_CHARS:
        raise ValueError(
            f"a token has {len(longest)} characters ({longest[:20]!r}...), expected at most "
            f"{MAX_TOKEN_CHARS}"
        )
