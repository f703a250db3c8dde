"""Patterns that cut a text before bytes are merged, by llama.cpp's names of them.

The patterns are those of the models' own tokenizer.json, which for "tekken" llama.cpp has without
marks; a name stands for several models whose
tokenizers are alike.
"""

from __future__ import annotations

from typing import NamedTuple

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _LETTERS + r"\p{N}{1,3}" + _REST, _LETTERS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Labels for patterns that no tokenizer.json spells out, since ByteLevel itself has them.
GPT2, SMOLLM = "that of ByteLevel", "digits, then that of ByteLevel"
# llama.cpp's own, for files without a name: one after the other.
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)


class Pre(NamedTuple):
    """What a name of tokenizer.ggml.pre means."""

    pattern: str | tuple[str, ...]  # or GPT2, SMOLLM
    ignore_merges: bool = False  # a word that is a token stays whole, whatever merges would make
    add_bos: bool = False  # unless the file says otherwise


PRE = {
    "default": Pre(DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), Pre(GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), Pre(SMOLLM)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Pre(LLAMA3, True, True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Pre(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Pre(QWEN2)),
    "tekken": Pre(TEKKEN, True, True),
}
