"""A reference for edited models: a torch model whose rows at each position are set by hand.

Tokens are bytes, so that a word has as many tokens as letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from architectures import SIZES, VARIANTS, write
from exact_models import export_exact
from torch import Tensor
from torch_model import random_tensors, torch_logits

import stem_edge
from stem_edge import Edit
from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model

PROMPT = "A cat met (dolphin) but no horse, cat."
Rows = dict[int, Tensor]  # layer -> rows


@dataclass(frozen=True)
class Oracle:
    """A model in torch."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    rows: Rows  # of every token

    def own(self, ids: Sequence[int]) -> Rows:
        """Return the rows that tokens look up without edits."""
        return {layer: table[list(ids)].clone() for layer, table in self.rows.items()}

    def mean(self, layer: int, text: str) -> Tensor:
        return self.rows[layer][list(text.encode())].mean(0)

    def logits(self, ids: Sequence[int], looked_up: Rows) -> F32:
        found: F32 = torch_logits(
            self.config, self.tensors, self.rows, list(ids), looked_up
        ).numpy()
        return found

    def edited(self, edits: Sequence[tuple[Any, ...]], ids: Sequence[int], prompt: int) -> Rows:
        """Return the rows of all positions; the first `prompt` are the prompt.

        edits: (source, texts whose mean rows replace those of its letters, scope, layers).
        """
        rows, text = self.own(ids), bytes(token if token < 256 else 0 for token in ids[:prompt])
        for source, letters, scope, layers in edits:
            for at, token in enumerate(ids):
                if scope == "everywhere":
                    found = chr(token) in source if token < 256 else False
                    place = source.index(chr(token)) if found else 0
                else:
                    starts = [n for n in range(prompt) if text[n:].startswith(source.encode())]
                    inside = [at - n for n in starts if 0 <= at - n < len(source)]
                    found, place = bool(inside), inside[0] if inside else 0
                for layer in layers or self.config.stem_layers:
                    if found:
                        rows[layer][at] = self.mean(layer, letters[place])
        return rows

    def greedy(self, ids: Sequence[int], edits: Sequence[tuple[Any, ...]], count: int) -> list[int]:
        """Generate `count` tokens greedily."""
        found = list(ids)
        for _ in range(count):
            logits = self.logits(found, self.edited(edits, found, len(ids)))
            found.append(int(logits[-1].argmax()))
        return found[len(ids) :]


@dataclass(frozen=True)
class Tried:
    path: Path
    oracle: Oracle


def tried(folder: Path, name: str) -> Tried:
    """Export a random model for each engine, with float32 rows."""
    config = ModelConfig(**(SIZES | VARIANTS[name]))
    write(folder / "checkpoint", config)
    out = export_exact(folder / "checkpoint", folder / "out")
    tensors, rows = random_tensors(config, 0)
    return Tried(out, Oracle(config, tensors, rows))


def tokens(chunks: Iterator[Any]) -> Iterator[int]:
    for chunk in chunks:
        yield from chunk.token_ids


def swap(model: Model, source: str, target: str, **options: Any) -> Edit:
    return stem_edge.make_edit(model.bundle, source, target, scheme="swap", **options)


def spec(source: str, target: str, scope: str = "positions", layers: Any = None) -> tuple[Any, ...]:
    return (source, list(target), scope, layers)
