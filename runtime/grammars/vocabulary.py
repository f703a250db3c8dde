"""A bundle's tokenizer as llguidance needs it: the bytes of each token, and how a text is split."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Vocabulary(NamedTuple):
    """Tokens as llguidance reads them, and what special ones are called in the bundle."""

    tokens: LLTokenizer
    special_ids: dict[str, int]


def vocabulary_of(tokenizer: str, eos_ids: Collection[int], vocab_size: int) -> Vocabulary:
    """Return a bundle's vocabulary, of `vocab_size` ids.

    tokenizer: JSON of the tokenizers library. eos_ids: what may follow a finished answer.
    Raises InputError without any, and for a tokenizer if its tokens have no own bytes.
    """
    if not eos_ids:  # llguidance would guess one
        raise InputError(
            "this bundle names no token that ends an answer, which structured output needs; generate "
            "without schema, regex and grammar"
        )
    file = json.loads(tokenizer)
    special_ids = {token["content"]: token["id"] for token in _special_tokens(file)}
    _rename_special_tokens(file)
    file["decoder"] = _decoder(file["decoder"])
    file["normalizer"] = _normalizer(file["normalizer"])
    for step in _steps(file["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    tokenizers = library()
    try:
        made: LLTokenizer = tokenizers.LLTokenizer(
            json.dumps(file, ensure_ascii=False), n_vocab=vocab_size, eos_token=list(eos_ids)
        )
    except ValueError as error:
        raise InputError(
            f"this bundle's tokenizer does not fit structured output ({one_reason(str(error))}); "
            "generate without schema, regex and grammar"
        ) from None
    return Vocabulary(made, special_ids)


def _special_tokens(file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (token for token in file["added_tokens"] if token["special"])


def _rename_special_tokens(file: dict[str, Any]) -> None:
    """Give special tokens names that no text has: llguidance reads names in a text as the tokens."""
    names = {token["content"]: f"<\ue000{token['id']}>" for token in _special_tokens(file)}
    for token in _special_tokens(file):
        token["content"] = names[token["content"]]
    model = file["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): at for name, at in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    file["post_processor"] = None  # which names them, and puts them around texts


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
    """Return the step that writes spaces, alone: to llguidance, tokens are the text itself."""
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
