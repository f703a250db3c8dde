"""Tokenizers trained on a few texts."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
from installed import DATA

WORDS = [
    *["the", "of", "and", "to", "in", "capital", "city", "river", "Paris", "Ouagadougou", "12"],
    *["345", "2024", "foo_bar()", "x==0:", "élan", "naïve", "Straße", "übermäßig", "東京都"],
    *["日本語", "は", "カタカナ", "서울", "한국어", "Москва", "Привет", "мир", "مرحبا", "שלום"],
    *["नमस्ते", "😀", "👍🏽", "<div>", "</s", "x41>", "we'll", "I'M", "YOU'RE"],
]
POOLS = [(0x20, 0x7F), (0, 0x20), (0x80, 0x590), (0x590, 0x700), (0x900, 0xD00), (0x2000, 0x2100)]
POOLS += [(0x2150, 0x2500), (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFF00, 0xFFF0)]
POOLS += [(0x1F1E6, 0x1F200), (0x1F300, 0x1F700), (0x10000, 0x110000)]


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)

    def piece() -> str:
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(WORDS) + rng.choice(["", " ", "  ", "\n"])
        if kind < 0.6:
            return rng.choice(" aen") * rng.randint(1, 12)
        return chr(rng.randrange(*rng.choice(POOLS)))

    return ["".join(piece() for _ in range(rng.randint(1, 30))) for _ in range(count)]


TEXTS = [*json.loads((DATA / "texts.json").read_text("utf-8")), *random_texts(400)]


def corpus() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 12))) for _ in range(300)]


def train_sp(path: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a tiny model, because the NFKC rules alone of a stored one would take 240 kB."""
    defaults: dict[str, Any] = {"vocab_size": 550, "character_coverage": 0.98}
    defaults |= {"hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=written, **(defaults | options)
    )
    path.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
