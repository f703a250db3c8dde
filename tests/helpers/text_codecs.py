"""Text codecs of small vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stem_edge.runtime.text.codec import TextCodec

# Words after a space, words at the beginning of a text, and pieces of them.
WORDS = ["ĠSpain", "Spain", "ĠGermany", "Ger", "many", "ĠChad", "Ch", "ad", "Ġof", "The", "Ġ", "Ċ"]
WORDS += ["ĠNew", "ĠZealand", "New", "Zea", "land", "ĠOman", "O", "man", "ĠBora", "Bora", "."]
END, TOOL = "<|end|>", "<tool>"


def codec_of(folder: Path) -> TextCodec:
    """Make a codec that prefers the longest word; ids are places in WORDS, then END."""
    unigrams = models.Unigram([(word, -1.0) for word in WORDS], unk_id=WORDS.index("."))
    tokenizer = Tokenizer(unigrams)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return saved(tokenizer, folder)


def byte_level(folder: Path, pieces: Sequence[bytes]) -> TextCodec:
    """Make a codec; ids below 256 are bytes, then come pieces, END (special) and TOOL."""
    chars = byte_chars()
    tokens = [*(bytes([byte]) for byte in range(256)), *pieces]
    vocab = {"".join(chars[byte] for byte in token): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(TOOL)])
    return saved(tokenizer, folder)


def saved(tokenizer: Tokenizer, folder: Path) -> TextCodec:
    """Write a tokenizer and read it as a codec."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder / "tokenizer.json")


def byte_chars() -> list[str]:
    """Characters that stand for the bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
