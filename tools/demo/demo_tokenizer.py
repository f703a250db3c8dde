"""The demo's byte-level BPE, saved as a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# How the public trainer splits text; <|begin_of_text|> and <|end_of_text|> are its first special tokens.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_COUNT = 256


class DemoTokenizer:
    """A BPE tokenizer learned from `texts`: 256 bytes and merges, together `rank_count` tokens."""

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
        """Return the text of the tokens before the first special token."""
        end = next((i for i, token in enumerate(tokens) if token >= self.bos), len(tokens))
        return self.bpe.decode(tokens[:end])

    def save(self, path: Path) -> None:
        """Write tokenizer.json with special tokens, and tokenizer_config.json with bos and eos."""
        names = [
            "begin_of_text",
            "end_of_text",
            *(f"reserved_{n}" for n in range(2, SPECIAL_COUNT)),
        ]
        self.bpe.add_special_tokens([f"<|{name}|>" for name in names])
        self.bpe.save(str(path))
        config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        path.with_name("tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
