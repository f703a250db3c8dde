"""The model in plain numpy: slow, obvious, and the oracle of every equality test.

Weights come from anything that can give float32 rows of a named matrix (a checkpoint, an opened
bundle, arrays in memory), so that one forward pass serves them all and no caller must hold a whole
model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables, rotate

# Rows of a matrix that are read at once: a head of 128,256 rows must not become one 1 GB array.
READ_ROWS = 8192


class Matrix(Protocol):
    """A matrix [rows, columns], or a vector [rows], read piece by piece."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and, for a matrix, columns."""

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32."""


class ArrayMatrix:
    """A Matrix over an array in memory."""

    def __init__(self, array: F32) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._array.shape

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop."""
        return self._array[start:stop]


def whole(matrix: Matrix) -> F32:
    """All of a matrix as one float32 array."""
    return matrix.rows(0, matrix.shape[0])


# Called with "layers.<l>.qkv", "wo", "gate" or "down" and the input [T, K] of those matrices.
Observer = Callable[[str, F32], None]


def forward(
    config: ModelConfig,
    backbone: Mapping[str, Matrix],
    tables: Mapping[int, Matrix],
    token_ids: Sequence[int],
    observe: Observer = lambda name, x: None,
) -> F32:
    """Logits float32 [T, V] of token_ids from an empty context.

    backbone: ModelConfig.backbone_shapes(); tables: STEM layer -> [V, d_ff]; observe: sees what
    goes into each group of matrices.
    """
    cos, sin = rope_tables(config, len(token_ids))
    x = _pick(backbone["embedding"], token_ids)
    for layer in range(config.n_layers):
        weights = {
            name: backbone[f"layers.{layer}.{name}"]
            for name in ("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "gate", "down")
        }
        at = f"layers.{layer}."
        normed = _rms_norm(x, weights["attention_norm"], config.norm_eps)
        observe(at + "qkv", normed)
        mixed = _attention(config, weights, normed, cos, sin)
        observe(at + "wo", mixed)
        x = x + _linear(mixed, weights["wo"])
        normed = _rms_norm(x, weights["ffn_norm"], config.norm_eps)
        observe(at + "gate", normed)
        if layer in config.stem_layers:
            up = _pick(tables[layer], token_ids)
        else:
            up = _linear(normed, backbone[at + "up"])
        product = _silu(_linear(normed, weights["gate"])) * up
        observe(at + "down", product)
        x = x + _linear(product, weights["down"])
    head = backbone["embedding" if config.tied_head else "head"]
    return _linear(_rms_norm(x, backbone["norm"], config.norm_eps), head)


def _attention(
    config: ModelConfig, weights: Mapping[str, Matrix], x: F32, cos: F32, sin: F32
) -> F32:
    """Causal grouped-query attention of x [T, dim], before wo."""
    length, group = len(x), config.n_heads // config.n_kv_heads
    q = _linear(x, weights["wq"]).reshape(length, config.n_heads, config.head_dim)
    k = _linear(x, weights["wk"]).reshape(length, config.n_kv_heads, config.head_dim)
    v = _linear(x, weights["wv"]).reshape(length, config.n_kv_heads, config.head_dim)
    q, k = (rotate(heads, cos, sin, config.rope_interleaved) for heads in (q, k))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(np.float32(config.head_dim))
    scores += np.triu(np.full((length, length), -np.inf, np.float32), 1)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hts,shd->thd", weight, v).reshape(length, -1), np.float32)


def _rms_norm(x: F32, weight: Matrix, eps: float) -> F32:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return np.asarray(x * scale * whole(weight), np.float32)


def _silu(x: F32) -> F32:
    # tanh form of the logistic function: exp(-x) would overflow for large negative x.
    return np.asarray(x * (0.5 + 0.5 * np.tanh(0.5 * x)), np.float32)


def _linear(x: F32, matrix: Matrix) -> F32:
    """x [T, K] times the transpose of matrix [N, K], in pieces of its rows."""
    starts = range(0, matrix.shape[0], READ_ROWS)
    pieces = [x @ matrix.rows(at, min(at + READ_ROWS, matrix.shape[0])).T for at in starts]
    return np.concatenate(pieces, axis=-1)


def _pick(matrix: Matrix, token_ids: Sequence[int]) -> F32:
    return np.concatenate([matrix.rows(token, token + 1) for token in token_ids])
