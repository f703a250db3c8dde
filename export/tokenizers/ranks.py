"""Conversion of tiktoken's rank files, and the tokenizer with bytes as tokens.

One difference remains: text of more than 400,000 characters, which the trainer cuts into pieces
first.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from stem_edge.errors import CheckpointError
from stem_edge.export.tokenizers.comparison import Conversion, Encode

MAX_TOKEN_CHARS = 4096
# Characters in all cuts of all tokens; a vocabulary of 256,000 has 20 million.
MAX_COMPARED = 1 << 27
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
_PATTERN = (  # the trainer's, which cuts text before bytes are merged
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {0: BOS, 1: EOS, 2: "<|fim_prefix|>", 3: "<|fim_middle|>"}
_NAMED |= {253: "<|fim_end_fill|>", 254: "<|fim_pad|>", 255: "<|fim_suffix|>"}


def convert_bytes() -> Conversion:
    """Build the tokenizer that has the bytes of UTF-8 as its first 256 ids."""
    # Byte-level instead of byte fallback, which decodes a whole run of bytes to U+FFFD when a
    # single one of them is wrong.
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(tokenizer, [BOS, EOS], lambda text: list(text.encode()))


def convert_ranks(path: Path) -> Conversion:
    """Convert a rank file with the trainer's pattern and names of special tokens.

    Raises CheckpointError without the package tiktoken, ValueError for a file that is damaged.
    """
    try:
        tiktoken = import_module("tiktoken")  # of an extra
    except ImportError as error:
        raise CheckpointError(
            f"this tokenizer needs tiktoken, which cannot be imported ({error}); "
            "pip install 'stem-edge[export]', or pass --tokenizer tokenizer.json"
        ) from error
    ranks, chars = _read_ranks(path), _byte_chars()
    named = {rank: "".join(chars[byte] for byte in token) for token, rank in ranks.items()}
    vocab = {named[rank]: rank for rank in range(len(named))}
    # tiktoken looks a word up as a whole before it merges bytes.
    model = models.BPE(vocab=vocab, merges=merges(vocab, vocab), ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    names = [_NAMED.get(i, f"<|reserved_special_token_{i}|>") for i in range(256)]
    special = {name: len(ranks) + i for i, name in enumerate(names)}
    # From the ranks, since tiktoken's own reader of files may return what its cache has of the path.
    original = tiktoken.Encoding(
        path.name, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return _finish(
        tokenizer,
        names,
        original.encode_ordinary,
        lambda text: original.encode(text, allowed_special="all"),
    )


def merges(ranked: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """List every pair of known tokens that makes a ranked one, in the order of the ranks.

    Raises ValueError for a vocabulary that would take minutes and gigabytes.
    """
    lengths, pairs, compared = {len(name) for name in known}, list[tuple[str, str]](), 0
    for name in ranked:
        if len(name) > MAX_TOKEN_CHARS:
            raise ValueError(
                f"a token has {len(name)} characters; expected up to {MAX_TOKEN_CHARS}"
            )
        cuts = [at for at in range(1, len(name)) if at in lengths and len(name) - at in lengths]
        compared += len(cuts) * len(name)
        if compared > MAX_COMPARED:
            raise ValueError("its tokens are too long and too alike for one made by merging")
        parts = ((name[:at], name[at:]) for at in cuts)
        pairs += [(first, second) for first, second in parts if first in known and second in known]
    return pairs


def _finish(
    tokenizer: Tokenizer, names: list[str], as_text: Encode, as_names: Encode | None = None
) -> Conversion:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return Conversion(tokenizer, as_text, BOS, EOS, as_names)


def _byte_chars() -> list[str]:
    """List the characters that stand for bytes: itself where it is in the alphabet, else the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in alphabet if ord(char) < 256}
    others = iter(char for char in alphabet if ord(char) >= 256)
    return [own.get(byte) or next(others) for byte in range(256)]


def _read_ranks(path: Path) -> dict[bytes, int]:
    pairs = [line.split() for line in path.read_bytes().splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if sorted(ranks.values()) != list(range(len(pairs))):
        raise ValueError(f"the ranks of {len(pairs)} lines are not 0 to {len(pairs) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{len(missing)} single bytes have no rank, the first is {missing[0]}")
    return ranks
