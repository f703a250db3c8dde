"""Rows of tokens to train on, each with a key, the question and the answer; positions with gaps."""

from __future__ import annotations

import random

import torch
from demo_tokenizer import DemoTokenizer
from passkey_text import DIGITS, KEY, QUESTION, number, sentence
from torch import Tensor

SENTENCES = 20_000  # that texts are made of
BATCH_TOKENS = 2048


class Rows:
    """Maker of training rows: a text, the question and the answer."""

    def __init__(self, tokenizer: DemoTokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.sentences = [tokenizer.encode(sentence(self.random)) for _ in range(SENTENCES)]
        self.tokenizer = tokenizer
        self.answer = len(tokenizer.encode(f" {'1' * DIGITS}"))  # tokens

    def batch(self, length: int, context: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions, both [B, length]; the last `answer` tokens of a row are the key.

        context: positions are below it; those of longer rows have no gaps.
        """
        rows = [self._row(length, context) for _ in range(max(1, BATCH_TOKENS // length))]
        return torch.tensor([ids for ids, _ in rows]), torch.stack([places for _, places in rows])

    def _row(self, length: int, context: int) -> tuple[list[int], Tensor]:
        encode, key = self.tokenizer.encode, number(self.random, DIGITS)
        hidden, end = encode(KEY.format(key)), encode(f"{QUESTION} {key}")
        filler = self._filler(length - 1 - len(hidden) - len(end))
        at = self.random.randint(0, len(filler))
        before, after = ([t for part in half for t in part] for half in (filler[:at], filler[at:]))
        ids = [self.tokenizer.bos, *before, *hidden, *after, *end]
        positions = torch.arange(length)
        for start in (1 + len(before), 1 + len(before) + len(hidden)):  # never inside the key
            positions[start:] += self.random.randint(0, max(0, context - length) // 2)
        return ids, positions

    def _filler(self, room: int) -> list[list[int]]:
        """Sentences of that many tokens together; the first is cut at its start."""
        parts = list[list[int]]()
        while room > 0:
            parts.insert(0, self.random.choice(self.sentences)[-room:])
            room -= len(parts[0])
        return parts
