"""Converts the tokenizer in a GGUF file, so that text gets the same ids as in llama.cpp.

| tokenizer.ggml.model | becomes |
|---|---|
| gpt2 | byte-level BPE; tokenizer.ggml.pre names the pattern that splits text first |
| llama | BPE in the style of sentencepiece, with merges in the order of the scores |
| gemma4 | as for llama, but the file lists the merges |

The patterns come from the models' tokenizer.json: llama.cpp's pattern for "tekken" lacks combining marks.

llama.cpp does not normalize text, and neither does the converted tokenizer, even if the original did.
Ids still differ for characters whose class differs between Unicode versions, for overlapping names of
special tokens in a text, and for the character "▁" itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.gguf import Value, open_gguf
from stem_edge.export.tensor_files.json import one_line
from stem_edge.text.tokenizer_gate import check_added, check_lengths
from stem_edge.text.tokenizer_model import MAX_MERGES_IN_ALL, MAX_TOKENS

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _LETTERS + r"\p{N}{1,3}" + _REST, _LETTERS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, SMOLLM = "that of ByteLevel", "digits, then that of ByteLevel"


# With these, BOS comes before a text unless the file says otherwise, and a word that is a token is not split,
# whatever merges exist.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
# Name in tokenizer.ggml.pre -> pattern.
PRE = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), SMOLLM),
    **dict.fromkeys((*WHOLE_WORDS, "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
}


AT = "tokenizer.ggml."
# Limit of the sum, over all tokens, of length * ways to cut; 256,000 tokens have 20 million.
MAX_COMPARED = 1 << 27
BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Names of tokens that end a turn. llama.cpp stops at all of them, even if a file names only one.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
        "<end_of_turn>", "<turn|>")  # fmt: skip


# Settings in a file: name of BOS, name of EOS, True if BOS is added to a text, chat template.
Said: TypeAlias = tuple[str | None, str | None, bool, str | None]


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, Said, tuple[int, ...]]:
    """Return tokenizer, settings, and ids that end a text. Raises CheckpointError, ValueError."""
    keys = open_gguf(path).keys
    kind = keys.get(AT + "model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4):
        raise CheckpointError(
            f"{path}: {AT}model is {one_line(repr(kind))}; expected '{BYTE_LEVEL}', "
            f"'{SENTENCEPIECE}' or '{GEMMA4}': give the model's tokenizer.json with --tokenizer"
        )
    names, types = _tokens(keys)
    named = keys.get(AT + "pre")
    pre = PRE.get(str(named)) if kind == BYTE_LEVEL else None
    if kind == BYTE_LEVEL and pre is None:
        raise CheckpointError(
            f"{path}: {AT}pre is {one_line(repr(named))}; expected one of {', '.join(PRE)}: give the "
            "model's tokenizer.json with --tokenizer"
        )
    special = [n for n, t in zip(names, types, strict=True) if t in (UNKNOWN, CONTROL)]
    own = [n for n, t in zip(names, types, strict=True) if t == USER_DEFINED]
    check_added(special + own)  # before the library gets them
    whole = named in WHOLE_WORDS
    if pre is None:
        tokenizer = _sentencepiece(keys, names, types)
    else:
        tokenizer = _byte_level(keys, names, pre, whole)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in own])
    ids = {key: _id(keys, names, key) for key in ("bos", "eos", "eot", "eom")}
    bos, eos = (None if (id := ids[key]) is None else names[id] for key in ("bos", "eos"))
    add_bos = bool(keys.get(AT + "add_bos_token", whole or pre is None))
    ends = [ids[key] for key in ("eos", "eot", "eom")]
    ends += [names.index(name) for name in ENDS if name in special]
    template = keys.get("tokenizer.chat_template")
    said = bos, eos, add_bos and bos is not None, template if isinstance(template, str) else None
    return tokenizer, said, tuple(dict.fromkeys(end for end in ends if end is not None))


def _tokens(keys: Mapping[str, Value]) -> tuple[list[str], list[int]]:
    """Return the name and the type of each token. Raises ValueError for too many names, or equal ones."""
    names = _texts(keys, "tokens")
    types = keys.get(AT + "token_type", [NORMAL] * len(names))
    if not isinstance(types, list) or len(types) != len(names):
        raise ValueError(f"{AT}token_type is not a list of {len(names)}, as {AT}tokens is")
    if len(names) > MAX_TOKENS:
        raise ValueError(f"{len(names):,} tokens, expected at most {MAX_TOKENS:,}")
    if len(set(names)) < len(names):
        raise ValueError(f"{len(names) - len(set(names))} tokens of {len(names)} are there twice")
    check_lengths(names)
    return names, types


def _texts(keys: Mapping[str, Value], key: str) -> list[str]:
    found = keys.get(AT + key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{AT}{key} is {one_line(repr(found), 24)}; expected a list of texts")
    return found


def _byte_level(keys: dict[str, Value], names: list[str], pattern: str, whole: bool) -> Tokenizer:
    known = {name: number for number, name in enumerate(names)}
    model = models.BPE(known, _merges(keys), ignore_merges=whole)
    tokenizer = Tokenizer(model)
    regex = pattern in (GPT2, SMOLLM)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pattern == SMOLLM:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif not regex:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if steps[1:] else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(keys: dict[str, Value]) -> list[tuple[str, str]]:
    """Return the file's BPE merges as pairs, and delete them from `keys` to save memory."""
    texts = _texts(keys, "merges")
    del keys[AT + "merges"]
    texts.reverse()  # and popped from the end, so that each string is freed when it is split
    cut = (texts.pop().partition(" ") for _ in range(len(texts)))
    known = {name: name for name in _texts(keys, "tokens")}  # shares strings, to save memory
    return [(known.get(first, first), known.get(second, second)) for first, _, second in cut]


def _ranked(keys: Mapping[str, Value], names: list[str], types: list[int]) -> list[tuple[str, str]]:
    """Return BPE merges whose results are normal tokens, in the order of the results' scores."""
    scores = keys.get(AT + "scores")
    if not isinstance(scores, list) or len(scores) != len(names):
        raise ValueError(f"{AT}scores is not a list of {len(names)}, as {AT}tokens is")
    # Only normal tokens: others, such as special tokens, are split off the text before merging.
    normal = [number for number, type in enumerate(types) if type == NORMAL]
    ranked = [names[number] for number in sorted(normal, key=lambda n: scores[n], reverse=True)]
    return _pairs(ranked, set(ranked))


def _pairs(ranked: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """List all pairs of known tokens that join to a token of `ranked`, in the order of `ranked`.

    Raises ValueError for a vocabulary that would take minutes and gigabytes.
    """
    lengths, pairs, compared = {len(name) for name in known}, list[tuple[str, str]](), 0
    for name in ranked:
        cuts = [at for at in range(1, len(name)) if at in lengths and len(name) - at in lengths]
        compared += len(cuts) * len(name)
        if compared > MAX_COMPARED or len(pairs) > MAX_MERGES_IN_ALL:
            raise ValueError("its tokens are too long and too alike for one made by merging")
        parts = ((name[:at], name[at:]) for at in cuts)
        pairs += [(first, second) for first, second in parts if first in known and second in known]
    return pairs


def _sentencepiece(keys: dict[str, Value], names: list[str], types: list[int]) -> Tokenizer:
    known = {name: number for number, name in enumerate(names)}
    unknown = next((name for name in names if types[known[name]] == UNKNOWN), None)
    complete = all(f"<0x{byte:02X}>" in known for byte in range(256))
    own = keys[AT + "model"] == GEMMA4
    pairs = _merges(keys) if own else _ranked(keys, names, types)
    model = models.BPE(known, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=complete)
    tokenizer = Tokenizer(model)
    prefix = bool(keys.get(AT + "add_space_prefix", not own))
    spaces = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _id(keys: Mapping[str, Value], names: list[str], key: str) -> int | None:
    number = keys.get(f"{AT}{key}_token_id")
    if number is not None and (type(number) is not int or not 0 <= number < len(names)):
        raise ValueError(
            f"{AT}{key}_token_id is {one_line(number)}; expected an id below {len(names)}"
        )
    return number
