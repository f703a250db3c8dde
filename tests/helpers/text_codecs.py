"""Text codecs of small vocabularies."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stem_edge.runtime.text.codec import TextCodec

# Words after a space, words at the beginning of a text, and pieces of them.
WORDS = ["ĠSpain", "Spain", "ĠGermany", "Ger", "many", "ĠChad", "Ch", "ad", "Ġof", "The", "Ġ", "Ċ"]
WORDS += ["ĠNew", "ĠZealand", "New", "Zea", "land", "ĠOman", "O", "man", "ĠBora", "Bora", "."]
END = "<|end|>"


def codec_of(folder: Path) -> TextCodec:
    """Make a codec that prefers the longest word; ids are places in WORDS, then END."""
    tokenizer = Tokenizer(
        models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token=".")
    )
    tokenizer.model = models.Unigram([(word, -1.0) for word in WORDS], unk_id=WORDS.index("."))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder / "tokenizer.json")


def byte_chars() -> list[str]:
    """Characters that stand for the bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
