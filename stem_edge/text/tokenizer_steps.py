"""Checks the steps of a tokenizer: their kinds, and how much they lengthen a text (a few could make gigabytes)."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any

import msgspec

MAX_STEPS = 64
MAX_DEPTH = 8  # of nested sequences
MAX_GROWTH = 1 << 11  # sentencepiece's NFKC with symbols (export/tokenizers) reaches 1,782
MAX_TEXT = 1 << 14  # characters of a pattern or other text of a step
MAX_PREFIX = 256  # characters of a text that a step adds to each word or token
MAX_CHARSMAP = 8 << 20
MAX_PIECES = 64  # pieces of a template, and tokens of a piece

# Part of the file -> field with the steps of a sequence, and kinds that the library knows.
KINDS = {
    "normalizer": (
        "normalizers",
        (
            *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
            *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
        ),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        (
            *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
            *("Metaspace", "Punctuation", "Split", "UnicodeScripts", "Whitespace"),
            "WhitespaceSplit",
        ),
    ),
    "post_processor": (
        "processors",
        ("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"),
    ),
    "decoder": (
        "decoders",
        (
            *("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace"),
            *("Strip", "WordPiece"),
        ),
    ),
}
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
# U+FDFA becomes 11 times its bytes. Counted once, because a second step cannot change the result.
COMPATIBILITY, COMPATIBILITY_GROWTH = ("NFKC", "NFKD"), 11
FIXED_GROWTH = {"ByteLevel": 2, "Metaspace": 3}


def check_model(model: Mapping[str, msgspec.Raw]) -> None:
    """Raise ValueError if a tokenizer's model has an unknown kind, or a field that is too long."""
    kind = msgspec.json.decode(model["type"], type=str) if "type" in model else None
    if kind is not None and kind not in MODELS:
        raise ValueError(f"model.type is {kind[:80]!r}, expected {' or '.join(MODELS)}")
    for name, raw in model.items():
        # Times 6, because JSON may write a character as \uXXXX.
        if name not in ("vocab", "merges") and len(raw) > MAX_PREFIX * 6:
            raise ValueError(
                f"model.{name[:80]} has {len(raw)} bytes, expected at most {MAX_PREFIX}"
            )


def check_steps(parts: Mapping[str, Any], vocab_size: int) -> int:
    """Return the largest factor by which tokenizer steps lengthen a text, encoding or decoding it.

    parts: key of KINDS, such as "decoder" -> its step. Raises ValueError for a step that is not accepted.
    """
    growths = dict.fromkeys(KINDS, 1)
    for part, step in parts.items():
        steps = list(_flat(part, step, part, 0)) if step is not None else []
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{part} has {len(steps)} steps, expected at most {MAX_STEPS}")
        for where, each in steps:
            _check_texts(where, each)
            _check_numbers(where, each, vocab_size)
        growths[part] = _growth(part, [each for _, each in steps])
    return max(growths["normalizer"] * growths["pre_tokenizer"], growths["decoder"])


def _flat(part: str, step: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path in the file, step) for a step, or for each step of a Sequence."""
    field, names = KINDS[part]
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        inner = step.get(field)
        if depth == MAX_DEPTH:
            raise ValueError(f"{part} has sequences more than {MAX_DEPTH} deep")
        if not isinstance(inner, list):
            raise ValueError(f"{path}.{field} is not a list of steps")
        for number, each in enumerate(inner):
            yield from _flat(part, each, f"{path}.{field}[{number}]", depth + 1)
    elif kind in names:
        yield path, step
    else:
        found = repr(kind)[:80] if isinstance(step, dict) else "not in an object"
        raise ValueError(f"{path}.type is {found}, expected Sequence, {', '.join(names)}")


def _check_texts(where: str, step: dict[str, Any]) -> None:
    for name, value in step.items():
        limit = MAX_CHARSMAP if name == "precompiled_charsmap" else MAX_TEXT
        if name in ("prepend", "prefix", "suffix", "replacement", "content", "pad_token"):
            limit = MAX_PREFIX
        longest = max((len(text) for text in _texts(value)), default=0)
        if longest > limit:
            raise ValueError(
                f"{where}.{name[:80]} has {longest} characters, expected at most {limit}"
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value. Recursion is safe, because msgspec limited the depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)


def _check_numbers(where: str, step: dict[str, Any], vocab_size: int) -> None:
    """Raise ValueError if a step has an invalid length, or adds invalid token ids to a text."""
    kind = step["type"]
    length = step.get("length")
    if kind == "FixedLength" and "length" in step and not (type(length) is int and length > 0):
        raise ValueError(f"{where}.length is {length!r}, expected at least 1")
    ids: list[Any] = []
    if kind in ("BertProcessing", "RobertaProcessing"):
        ids = [pair[1:] for pair in (step.get("sep"), step.get("cls")) if isinstance(pair, list)]
    elif kind == "TemplateProcessing":
        ids = _template_ids(where, step)
    for number in chain.from_iterable(ids):
        if type(number) is not int or not 0 <= number < vocab_size:
            raise ValueError(f"{where} adds the id {number!r}, expected 0 to {vocab_size - 1}")


def _template_ids(where: str, step: dict[str, Any]) -> list[list[Any]]:
    single, specials = step.get("single"), step.get("special_tokens")
    single = single if isinstance(single, list) else []
    named = specials.values() if isinstance(specials, dict) else []
    ids = [token.get("ids") for token in named if isinstance(token, dict)]
    lists = [each for each in ids if isinstance(each, list)]
    texts = sum(isinstance(piece, dict) and "Sequence" in piece for piece in single)
    if texts != 1 or len(single) > MAX_PIECES or any(len(each) > MAX_PIECES for each in lists):
        raise ValueError(
            f"{where}.single has the text {texts} times among {len(single)} pieces, expected "
            f"once among at most {MAX_PIECES} pieces of at most {MAX_PIECES} tokens each"
        )
    return lists


def _growth(part: str, steps: list[dict[str, Any]]) -> int:
    """Return the factor by which a part's steps together lengthen a text. Raises ValueError."""
    factors = [_factor(step) for step in steps]
    if any(step["type"] in COMPATIBILITY for step in steps):
        factors.append(COMPATIBILITY_GROWTH)
    growth = prod(factors)
    if growth > MAX_GROWTH:
        raise ValueError(
            f"{part} can make a text {min(growth, 10**12):,} times as long, expected at most "
            f"{MAX_GROWTH:,} times"
        )
    return growth


def _factor(step: dict[str, Any]) -> int:
    """Return the maximum number of bytes that a tokenizer step makes from one byte."""
    if step["type"] == "Replace":
        pattern, content = step.get("pattern"), str(step.get("content", ""))
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(plain, str) and plain:
            return -(-max(1, len(content.encode())) // len(plain.encode()))
        # Plus 1, because a regular expression may match between any two bytes and keep both.
        return 1 + len(content.encode())
    if step["type"] == "Precompiled":
        return _charsmap_growth(step.get("precompiled_charsmap"))
    return FIXED_GROWTH.get(step["type"], 1)


def _charsmap_growth(charsmap: Any) -> int:
    """Return the bytes of the longest text in a charsmap. charsmap: base64 of a trie and texts."""
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
