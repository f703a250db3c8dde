"""A bundle's tokenizer as llguidance needs it: the bytes of each token, and how a text is split."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from stem_edge.errors import InputError
from stem_edge.runtime.grammars.library import library, one_reason

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# How pieces with U+2581 for a space, and <0x0A> for a byte, become text; llguidance knows this form
# alone, not the Metaspace decoder, which means the same.
_PIECES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def guided_tokenizer(tokenizer: str, eos_ids: Collection[int], vocab_size: int) -> LLTokenizer:
    """Return llguidance's tokenizer, of `vocab_size` ids.

    tokenizer: JSON of the tokenizers library. eos_ids: what may follow a finished answer.
    Raises InputError without any, and for a tokenizer whose tokens have no bytes of their own.
    """
    file = json.loads(tokenizer)
    file["decoder"] = _decoder(file["decoder"])
    if not eos_ids:  # llguidance would guess one
        raise InputError(
            "this bundle names no token that ends an answer, which structured output needs; generate "
            "without schema, regex and grammar"
        )
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
    spaces = any(step.get("pattern", {}).get("String") == "\u2581" for step in steps)
    if ("Metaspace" in kinds or spaces) and kinds <= {
        *("Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"),
    }:
        return _PIECES
    raise InputError(
        f"this bundle's tokenizer joins tokens by {', '.join(sorted(kinds)) or 'spaces'}, so that they "
        "have no bytes of their own, which structured output needs; generate without schema, regex "
        "and grammar"
    )


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
    for each in decoder.get("decoders", ()):
        yield from _steps(each)
