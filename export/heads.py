"""Heads as wide as the attention operator wants them: zeros that change no score and no output."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph_io import head_width
from stem_edge.quantize import F32
from stem_edge.reference import ArrayMatrix, Matrix, whole

HEAD_MATRICES = ("wq", "wk", "wv", "wo")


def pad_heads(config: ModelConfig, matrices: Mapping[str, Matrix]) -> Mapping[str, Matrix]:
    """wq, wk, wv [heads * head_dim, dim] and wo [dim, heads * head_dim], head_dim padded."""
    extra = head_width(config) - config.head_dim
    if not extra:
        return matrices
    # RoPE turns pairs; where a pair is one value of each half, both halves must grow.
    halves = 1 if config.rope_interleaved else 2
    return {
        "wq": _pad_rows(matrices["wq"], config.n_heads * halves, extra // halves),
        "wk": _pad_rows(matrices["wk"], config.n_kv_heads * halves, extra // halves),
        "wv": _pad_rows(matrices["wv"], config.n_kv_heads, extra),
        "wo": ArrayMatrix(_pad(whole(matrices["wo"]).T, config.n_heads, extra).T),
    }


def _pad_rows(matrix: Matrix, parts: int, extra: int) -> ArrayMatrix:
    return ArrayMatrix(_pad(whole(matrix), parts, extra))


def _pad(array: F32, parts: int, extra: int) -> F32:
    """[parts * n, K] -> [parts * (n + extra), K], zeros at the end of each part."""
    cut = array.reshape(parts, -1, array.shape[1])
    return np.pad(cut, ((0, 0), (0, extra), (0, 0))).reshape(-1, array.shape[1])
