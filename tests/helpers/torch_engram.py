"""Engram modules in plain torch, for one stream.

Written from the paper's formulas (arXiv 2601.07372), with whole numbers of Python and torch's own convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stem_edge.config import ModelConfig


def with_engram(
    config: ModelConfig, tensors: dict[str, Tensor], tables: Tensor, ids: Sequence[int]
) -> Callable[[int, Tensor], Tensor]:
    """Return what changes the hidden states [T, D] before a layer; tables: all, layer by layer."""
    parts = tables.split(list(config.ngram_sizes))

    def before(layer: int, x: Tensor) -> Tensor:
        if layer not in config.stem_layers:
            return x
        at, number = f"layers.{layer}.", config.stem_layers.index(layer)
        w = {k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}
        each, numbers = len(parts) // len(config.stem_layers), config.ngram_multipliers[number]
        heads, rows = each // (config.ngram_order - 1), list[Tensor]()
        for head, table in enumerate(parts[number * each : (number + 1) * each]):
            used = numbers[: 2 + head // heads]
            places = [row_of(config, ids[: n + 1], used, len(table)) for n in range(len(ids))]
            rows.append(table[places])
        return x + change(config, w, torch.cat(rows, dim=1), x)

    return before


def change(config: ModelConfig, w: dict[str, Tensor], rows: Tensor, x: Tensor) -> Tensor:
    """The sum [T, D] that a module adds to x, by the rows [T, tables * width] of its tokens."""

    def norm(y: Tensor, name: str) -> Tensor:
        weight = w[f"engram_{name}_norm"]
        return functional.rms_norm(y, weight.shape, weight, config.norm_eps)

    key, value = (rows @ w["project"].T).chunk(2, dim=1)
    gate = (norm(x, "query") * norm(key, "key")).sum(dim=1) / math.sqrt(config.dim)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    value = gate.sigmoid()[:, None] * value
    if not (kernel := config.engram_kernel):
        return value
    padded = functional.pad(norm(value, "conv").T, ((kernel - 1) * config.ngram_order, 0))
    taps = torch.stack([w[f"engram_conv_{tap}"] for tap in range(kernel)], dim=1)[:, None]
    apart = config.ngram_order
    convolved = functional.conv1d(padded, taps, dilation=apart, groups=config.dim)
    return value + functional.silu(convolved.T)


def row_of(config: ModelConfig, ids: Sequence[int], numbers: Sequence[int], size: int) -> int:
    """Row of a table that the last of some ids looks up; before an end, or the text, is the filler."""
    mixed = ids[-1] * numbers[0]
    for distance, number in enumerate(numbers[1:], 1):
        seen = ids[-1 - distance :]
        known = len(seen) > distance and config.ngram_end not in seen[:-1]
        mixed ^= (seen[0] if known else config.ngram_filler) * number
    return mixed % size
