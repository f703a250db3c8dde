"""The demo's byte-level BPE, saved as the tiktoken rank file that the public trainer reads."""

from __future__ import annotations

import base64
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# These must equal what the trainer's tiktoken tokenizer has built in, because a rank file records neither
# the split pattern nor the special tokens; <|begin_of_text|> and <|end_of_text|> are the first two.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_COUNT = 256


class DemoTokenizer:
    """BPE with `rank_count` ranks (256 bytes and the merges), learned from `texts`."""

    def __init__(self, texts: list[str], rank_count: int) -> None:
        self.bpe = Tokenizer(models.BPE(ignore_merges=True))
        self.bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self.bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=rank_count, initial_alphabet=alphabet, show_progress=False
        )
        self.bpe.train_from_iterator(texts, trainer)
        self.bos = self.bpe.get_vocab_size()
        self.eos = self.bos + 1
        self.vocab_size = self.bos + SPECIAL_COUNT

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text).ids

    def prompt(self, text: str) -> list[int]:
        return [self.bos, *self.encode(text)]

    def documents(self, texts: list[str]) -> list[list[int]]:
        """Encode each text between <|begin_of_text|> and <|end_of_text|>."""
        return [[self.bos, *e.ids, self.eos] for e in self.bpe.encode_batch(texts)]

    def decode(self, tokens: list[int]) -> str:
        """Decode up to the first special token."""
        end = next((i for i, token in enumerate(tokens) if token >= self.bos), len(tokens))
        return self.bpe.decode(tokens[:end])

    def save_ranks(self, path: Path) -> None:
        """Write lines `base64(token bytes) rank`, in order of rank."""
        byte_of = byte_by_symbol()
        by_rank = sorted(self.bpe.get_vocab().items(), key=lambda item: item[1])
        lines = (
            base64.b64encode(bytes(byte_of[symbol] for symbol in token)) + b" %d\n" % rank
            for token, rank in by_rank
        )
        path.write_bytes(b"".join(lines))


def byte_by_symbol() -> dict[str, int]:
    """Map the printable characters of byte-level BPE to the bytes that they stand for.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + i): byte for i, byte in enumerate(others)}
