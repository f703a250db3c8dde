"""Rows of n-grams in the demo's model: beside the input embedding (LongCat), or in a layer (Engram).

Shapes: B sequences of T tokens; D = dim. Two tables have rows for the last two ids, two for three.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stem_edge.numerics.ngram_hash import NgramHash

ORDER = 3  # the most ids of an n-gram
TABLES = 4
RANK = 128  # values of a row: a group that the report rounds to int8
KERNEL = 4  # tokens that Engram's convolution adds up
LEAST = 1e-6  # of what a root is taken of
NUMBERS = (23703573157769, 20109073645365, 8052911324071)  # Engram's, of each id; any odd ones


def described(rows: int, end: int, layer: int | None) -> dict[str, Any]:
    """What the config of a model says of tables of about so many rows each."""
    found: dict[str, Any] = {
        "stem_ffn": "ngrams" if layer is None else "engram",
        "stem_layers": (layer or 0,),
        "row_rank": RANK,
        "ngram_order": ORDER,
        "ngram_sizes": tuple(rows // 2 * 2 + 2 * table + 1 for table in range(TABLES)),
        "ngram_end": end,
    }
    if layer is not None:
        found |= {"ngram_multipliers": (NUMBERS,), "engram_kernel": KERNEL}
    return found


class Ngrams(nn.Module):
    """The rows [B, T, TABLES * RANK] of tokens [B, T]."""

    def __init__(self, keys: NgramHash, dim: int) -> None:
        super().__init__()
        self.keys = keys
        self.rows = nn.Embedding(keys.rows, RANK)
        nn.init.normal_(self.rows.weight, std=dim**-0.5)

    def found(self, tokens: Tensor) -> Tensor:
        keys = torch.stack([torch.from_numpy(self.keys.keys(ids.numpy())) for ids in tokens])
        rows: Tensor = self.rows(keys)
        return rows.flatten(2)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [B, T, D] with what the rows of the tokens change."""
        raise NotImplementedError

    def stored(self) -> dict[str, Tensor]:
        """Tensors by their names in a checkpoint."""
        raise NotImplementedError


class NgramEmbedding(Ngrams):
    """(x + the projected row of each table) / (1 + tables), as arXiv 2601.21204 has it."""

    def __init__(self, keys: NgramHash, dim: int) -> None:
        super().__init__(keys, dim)
        self.project = nn.Linear(TABLES * RANK, dim, bias=False)
        nn.init.normal_(self.project.weight, std=RANK**-0.5)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        changed: Tensor = (x + self.project(self.found(tokens))) / (1 + TABLES)
        return changed

    def stored(self) -> dict[str, Tensor]:
        tables = self.rows.weight.split(self.keys.sizes)
        projects = self.project.weight.split(RANK, dim=1)
        at = "model.ngram_embeddings."
        return {f"{at}embedders.{n}.weight": table for n, table in enumerate(tables)} | {
            f"{at}post_projs.{n}.weight": project for n, project in enumerate(projects)
        }


class Engram(Ngrams):
    """x + v + SiLU(conv(norm(v))), v = g W_v e, with a gate g of x and W_k e (arXiv 2601.07372)."""

    def __init__(self, keys: NgramHash, dim: int, layer: int, eps: float) -> None:
        super().__init__(keys, dim)
        self.layer = layer
        self.key_proj, self.value_proj = (
            nn.Linear(TABLES * RANK, dim, bias=False) for _ in range(2)
        )
        self.query_norm, self.key_norm, self.conv_norm = (
            nn.RMSNorm(dim, eps=eps) for _ in range(3)
        )
        self.conv = nn.Conv1d(dim, dim, KERNEL, dilation=ORDER, groups=dim, bias=False)
        nn.init.zeros_(self.conv.weight)  # so that it begins as if it were not there

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        rows = self.found(tokens)
        match = (self.query_norm(x) * self.key_norm(self.key_proj(rows))).sum(-1, keepdim=True)
        match = match / math.sqrt(x.shape[-1])
        gate = (match.abs().clamp_min(LEAST).sqrt() * match.sign()).sigmoid()
        value = gate * self.value_proj(rows)
        before = functional.pad(self.conv_norm(value).transpose(1, 2), ((KERNEL - 1) * ORDER, 0))
        changed: Tensor = x + value + functional.silu(self.conv(before).transpose(1, 2))
        return changed

    def stored(self) -> dict[str, Tensor]:
        parts = {
            name: tensor for name, tensor in self.state_dict().items() if name != "rows.weight"
        }
        parts["embed.weight"] = self.rows.weight
        return {f"model.layers.{self.layer}.engram.{name}": part for name, part in parts.items()}
