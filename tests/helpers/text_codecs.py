"""Text codecs of small vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def probe_texts(special_tokens: Sequence[str] = ()) -> Iterator[str]:
    """Yield texts that expose faulty tokenizers: runs, long words, every kind of character."""
    for char in ("a", "A", " ", "\n", "0", "_", ".", "\u00e9", "\u4e00", "\U0001f600", "\u0301"):
        yield char * 40 + "!"
        yield char * 4000
    yield "".join(map(chr, range(0x500)))
    yield " ".join(map(chr, range(0x300)))
    yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)
    yield "\ufdfa\u1e9e\u0130\ufb03" * 100
    yield "the quick brown fox's 12345 jumped; didn't it?\r\n\t" * 40
    yield "abcdefghijklmnopqrstuvwxyz" * 200
    yield from special_tokens[:64]
    yield " ".join(special_tokens[:1024])
    yield ""
