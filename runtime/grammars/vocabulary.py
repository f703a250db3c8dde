"""A bundle's tokenizer as llguidance needs it: the bytes of each token, and how a text is split."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.library import library, one_reason

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPACE = "\u2581"  # which stands for one in pieces
# How such pieces, and <0x0A> for bytes, become text; llguidance knows this form
# alone, not the Metaspace decoder, which means the same.
_PIECES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def guided_tokenizer(tokenizer: str, eos_ids: Collection[int], vocab_size: int) -> LLTokenizer:
    """Return llguidance's tokenizer, of `vocab_size` ids.

    tokenizer: JSON of the tokenizers library. eos_ids: what may follow a finished answer.
    Raises InputError without any, and for a tokenizer whose tokens have no bytes of their own.
    """
    if not eos_ids:  # llguidance would guess one
        raise InputError(
            "this bundle names no token that ends an answer, which structured output needs; generate "
            "without schema, regex and grammar"
        )
    file = json.loads(tokenizer)
    file["decoder"] = _decoder(file["decoder"])
    file["normalizer"] = _normalizer(file["normalizer"])
    for step in _steps(file["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    try:
        made: LLTokenizer = library().LLTokenizer(
            json.dumps(file, ensure_ascii=False), n_vocab=vocab_size, eos_token=list(eos_ids)
        )
    except ValueError as error:
        raise InputError(
            f"this bundle's tokenizer does not fit structured output ({one_reason(str(error))}); "
            "generate without schema, regex and grammar"
        ) from None
    return made


def _decoder(decoder: dict[str, Any] | None) -> dict[str, Any]:
    steps = list(_steps(decoder))
    kinds = {step["type"] for step in steps}
    if decoder is not None and kinds == {"ByteLevel"}:
        return decoder
    spaces = any(_pattern(step) == SPACE for step in steps)
    if ("Metaspace" in kinds or spaces) and kinds <= {
        *("Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"),
    }:
        return _PIECES
    raise InputError(
        f"this bundle's tokenizer joins tokens by {', '.join(sorted(kinds)) or 'spaces'}, so that they "
        "have no bytes of their own, which structured output needs; generate without schema, regex "
        "and grammar"
    )


def _normalizer(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what is left without changes to a text: llguidance takes tokens for the text it gave."""
    kept = [
        step for step in _steps(normalizer) if _pattern(step) == " " and step["content"] == SPACE
    ]
    return kept[0] if kept else None


def _pattern(step: dict[str, Any]) -> str | None:
    """Return the text that a step replaces, if it does so."""
    pattern = step.get("pattern")
    return pattern.get("String") if isinstance(pattern, dict) else None


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of the file, including those in sequences."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        for each in part.get(name, ()):
            yield from _steps(each)
