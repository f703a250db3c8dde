r"""Metadata of a tokenizer in GGUF's standard keys, so that llama.cpp reads text as the model does.

| tokenizer.ggml.model | tokenizers |
|---|---|
| gpt2 | byte-level BPE, after the pre-tokenization that tokenizer.ggml.pre names |
| llama | BPE as sentencepiece does it, with a token for each byte |
| no_vocab | all others: llama.cpp then takes and returns only token ids |

llama.cpp gives the ids of the tokenizers library, with these exceptions:

- a pattern that it does not know becomes "default"; `differences` finds this and more;
- characters whose class differs between the Unicode versions of the two;
- names of special tokens that overlap in a text, and white space that a token strips around it;
- the text "▁" itself is read as a space in "llama" tokenizers, as sentencepiece does.

A model with more tokens than its tokenizer gets unused tokens [PAD0] and so on. There is no
tokenizer.ggml.padding_token_id, because no exported tokenizer pads. tokenizer.huggingface.json
holds the whole tokenizer, for readers that know it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stem_edge.export.backbone.gguf_writer import GgufValue
from stem_edge.export.tokenizers.gguf import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    GPT2,
    LLAMA3,
    NORMAL,
    QWEN2,
    SENTENCEPIECE,
    SMOLLM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from stem_edge.export.tokenizers.tokenizer import ExportedTokenizer
from stem_edge.numerics.quantize import F32, I32

NONE = "no_vocab"
BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>\Z")
# llama.cpp needs merges, and an empty array cannot say its type. This merge never happens, because
# no other makes its first part, which is longer than a character.
NO_MERGES = ("no merges",)

# (pattern, ignore_merges) -> tokenizer.ggml.pre
PRE = {
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (GPT2, False): "gpt-2",
    (SMOLLM, False): "smollm",
}
UNKNOWN_PATTERN = "default"


def tokenizer_metadata(converted: ExportedTokenizer, vocab_size: int) -> dict[str, GgufValue]:
    """Return the keys tokenizer.*; vocab_size: tokens of the model, at least the tokenizer's."""
    parsed = json.loads(converted.json)
    kind = _kind(parsed)
    values: dict[str, GgufValue] = {"tokenizer.ggml.model": kind}
    if kind == NONE:
        return values | {"tokenizer.huggingface.json": converted.json}
    merges = [_pair(merge) for merge in parsed["model"]["merges"]]
    names = _names(converted, vocab_size)
    if kind == BYTE_LEVEL:
        values["tokenizer.ggml.pre"] = _pre(parsed)
        values["tokenizer.ggml.merges"] = tuple(map(" ".join, merges)) or NO_MERGES
    else:
        values["tokenizer.ggml.pre"] = UNKNOWN_PATTERN  # unused; only to avoid llama.cpp's warning
        values["tokenizer.ggml.scores"] = _scores(names, merges)
        values["tokenizer.ggml.add_space_prefix"] = _prefixed(parsed)
    values["tokenizer.ggml.tokens"] = names
    values["tokenizer.ggml.token_type"] = _types(parsed, names, kind)
    values |= _special(converted, names, parsed["model"].get("unk_token"))
    return values | {"tokenizer.huggingface.json": converted.json}


def differences(converted: ExportedTokenizer) -> tuple[str, ...]:
    """Say where llama.cpp reads text otherwise, in a sentence each; the module names the rest."""
    parsed = json.loads(converted.json)
    kind, found = _kind(parsed), list[str]()
    if kind == NONE:
        return ("llama.cpp has no such tokenizer: it will take and return token ids, not text",)
    if kind == BYTE_LEVEL:
        if parsed["model"]["merges"] and _pre(parsed) == UNKNOWN_PATTERN:
            found.append("llama.cpp does not know the tokenizer's pattern: some ids will differ")
        if parsed.get("normalizer"):
            found.append("llama.cpp does not normalise text as the tokenizer does")
        return tuple(found)
    if not _plain_spaces(parsed):
        found.append("llama.cpp does not normalise text, or treat spaces, as the tokenizer does")
    vocab, merges = parsed["model"]["vocab"], {_pair(m) for m in parsed["model"]["merges"]}
    halves = ((name[:at], name[at:]) for name in vocab for at in range(1, len(name)))
    special = {token["content"] for token in parsed["added_tokens"]}
    if any(
        a in vocab and b in vocab and (a, b) not in merges
        for a, b in halves
        if a + b not in special
    ):
        found.append("llama.cpp merges any two tokens that make a third; the tokenizer does not")
    return tuple(found)


def _kind(parsed: dict[str, Any]) -> str:
    """Return the tokenizer.ggml.model of a tokenizer.json."""
    model = parsed["model"]
    unknown = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    if model["type"] != "BPE" or any(model.get(key) for key in unknown):
        return NONE
    if _steps(parsed.get("pre_tokenizer"), "pretokenizers", "ByteLevel"):
        return BYTE_LEVEL
    complete = all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return SENTENCEPIECE if model.get("byte_fallback") and complete else NONE


def _steps(part: Any, inside: str, kind: str = "") -> list[dict[str, Any]]:
    """List the steps of a normalizer or pre-tokenizer in their order; with `kind`, of that type."""
    if not part:
        return []
    steps = part[inside] if part["type"] == "Sequence" else [part]
    return [step for step in steps if kind in ("", step["type"])]


def _pre(parsed: dict[str, Any]) -> str:
    merged = parsed["model"]
    if not merged["merges"]:
        return PRE[GPT2, False]  # any would do, since single bytes do not depend on the pattern
    # An absent key means False, as in files older than the key.
    return PRE.get((_pattern(parsed), bool(merged.get("ignore_merges"))), UNKNOWN_PATTERN)


def _pattern(parsed: dict[str, Any]) -> str:
    """Return the pattern that cuts text before bytes are merged; "" if it is not known here."""
    match _steps(parsed["pre_tokenizer"], "pretokenizers"):
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False},
        ]:
            return SMOLLM
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern
    return ""


def _pair(merge: Any) -> tuple[str, str]:
    """Read a merge: "a b" in older files, ["a", "b"] in newer ones."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _names(converted: ExportedTokenizer, vocab_size: int) -> list[str]:
    """List the tokens' texts by id, no text twice."""
    vocab = Tokenizer.from_str(converted.json).get_vocab(with_added_tokens=True)
    by_id = {number: name for name, number in vocab.items()}
    names = []
    for number in range(vocab_size):
        name = by_id.get(number)
        if name is None:
            name = f"[PAD{number}]"
            while name in vocab:
                name += "_"
        names.append(name)
    return names


def _scores(names: list[str], merges: list[tuple[str, str]]) -> F32:
    """Return scores: the earlier the merge that makes a token, the greater; least for tokens without a merge."""
    rank = {a + b: number for number, (a, b) in reversed(list(enumerate(merges)))}
    return np.array([-float(rank.get(name, len(merges))) for name in names], np.float32)


def _types(parsed: dict[str, Any], names: list[str], kind: str) -> I32:
    added = {token["content"]: token["special"] for token in parsed["added_tokens"]}
    vocab = parsed["model"]["vocab"]
    types = []
    for name in names:
        if name == parsed["model"].get("unk_token"):
            types.append(UNKNOWN)
        elif name in added:
            types.append(CONTROL if added[name] else USER_DEFINED)
        elif kind == SENTENCEPIECE and BYTE_NAME.match(name):
            types.append(BYTE)
        else:
            types.append(NORMAL if name in vocab else UNUSED)
    return np.array(types, np.int32)


def _special(
    converted: ExportedTokenizer, names: list[str], unknown: str | None
) -> dict[str, GgufValue]:
    """Return special tokens' ids, whether a text gets begin and end, and the chat template."""
    ids = {"bos": converted.bos_id, "unknown": names.index(unknown) if unknown else None}
    ids |= dict(zip(("eos", "eot", "eom"), converted.eos_ids, strict=False))
    values: dict[str, GgufValue] = {
        f"tokenizer.ggml.{name}_token_id": number
        for name, number in ids.items()
        if number is not None
    }
    for key in ("add_bos_token", "add_eos_token"):
        values[f"tokenizer.ggml.{key}"] = bool(converted.config.get(key))
    template = converted.config.get("chat_template")
    if isinstance(template, list):  # several with names, but llama.cpp reads only one
        named = {each["name"]: each["template"] for each in template}
        template = named.get("default")
    return values | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _prefixed(parsed: dict[str, Any]) -> bool:
    """Return whether a text gets a space before it."""
    if _steps(parsed.get("normalizer"), "normalizers", "Prepend"):
        return True
    spaces = _steps(parsed.get("pre_tokenizer"), "pretokenizers", "Metaspace")
    return any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _plain_spaces(parsed: dict[str, Any]) -> bool:
    """Return whether the tokenizer at most replaces spaces and puts one before each ordinary text."""
    for step in _steps(parsed.get("normalizer"), "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                continue
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                continue
        return False
    for step in _steps(parsed.get("pre_tokenizer"), "pretokenizers"):
        match step:
            # No other scheme, since llama.cpp puts a space before texts that begin with one, too.
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}:
                continue
        return False
    return True
