"""Arithmetic of the reference model in float32: products, norms, activations and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stem_edge.layers import Activation
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32

# Most matrix rows read at once, because a head of 128,256 rows would be an array of 1 GB.
READ_ROWS = 2048
ATTENTION_ROWS = 128  # queries whose scores are in memory at once

# Called with (name, input [T, K]) of a group of matrices. Names are "head", or "layers.<l>." followed
# by "qkv", "wo", "gate" (the input of gate and up), "down", "project" or the name of a matrix.
Observer = Callable[[str, F32], None]


def linear(x: F32, weights: Mapping[str, Matrix], name: str) -> F32:
    """Return x [T, K] times the transpose of the matrix `name` [N, K], plus its bias, if any.

    If `weights` has `name`.range, x and the result are rounded to multiples of its two numbers.
    """
    matrix, bias, steps = weights[name], weights.get(name + ".bias"), (0.0, 0.0)
    if (ranged := weights.get(name + ".range")) is not None:
        steps = ranged.rows(0, 1)[0], ranged.rows(1, 2)[0]
        x = on_grid(x, steps[0])
    product = np.empty((*x.shape[:-1], matrix.shape[0]), np.float32)
    for at in range(0, matrix.shape[0], READ_ROWS):
        rows = matrix.rows(at, at + READ_ROWS)
        np.matmul(x, rows.T, out=product[..., at : at + len(rows)])
    if bias is not None:
        product += bias.rows(0, bias.shape[0])
    return on_grid(product, steps[1])


def on_grid(x: F32, step: float) -> F32:
    """Round x to multiples of `step`, -128 to 127 steps, ties to even. If `step` is 0, return x."""
    if not step:
        return x
    return np.asarray(
        np.clip(np.rint(x / np.float32(step)), -128, 127) * np.float32(step), np.float32
    )


def pick(matrix: Matrix, token_ids: Sequence[int]) -> F32:
    """Return the rows of a matrix for these token ids [T]. A repeated id is read once."""
    tokens, places = np.unique(token_ids, return_inverse=True)
    rows = np.concatenate([matrix.rows(token, token + 1) for token in tokens.tolist()])
    return np.asarray(rows[places], np.float32)


def rms_norm(x: F32, weight: Matrix, eps: float) -> F32:
    return np.asarray(normalized(x, eps) * weight.rows(0, weight.shape[0]), np.float32)


def normalized(x: F32, eps: float) -> F32:
    """Return the RMS norm of x over the last axis, without a weight."""
    return np.asarray(x / np.sqrt(mean_square(x) + np.float32(eps)), np.float32)


def mean_square(x: F32) -> F32:
    """Return the mean of squares over the last axis, which stays with size 1."""
    return np.asarray(np.mean(x * x, axis=-1, keepdims=True), np.float32)


def activated(activation: Activation, x: F32) -> F32:
    return silu(x) if activation == "silu" else gelu(x)


def gelu(x: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)


def silu(x: F32) -> F32:
    return np.asarray(x * logistic(x), np.float32)


def logistic(x: F32) -> F32:
    """Return the logistic function of x. It uses tanh, because exp(-x) could overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x), np.float32)


def sparse_gate(gate: F32, deviations: float) -> F32:
    """Return max(0, gate - cutoff); cutoff = mean + deviations * std of each row of gate [T, K]."""
    above = gate - gate.mean(axis=-1, keepdims=True)
    least = np.float32(deviations) * np.sqrt(mean_square(above))
    return np.asarray(np.maximum(above - least, 0), np.float32)


def rotate(heads: F32, cos: F32, sin: F32, interleaved: bool) -> F32:
    """Apply RoPE to heads [T, H, head_dim], with cosines and sines [T, head_dim / 2]."""
    half = heads.shape[-1] // 2
    a, b = (
        (heads[..., 0::2], heads[..., 1::2])
        if interleaved
        else (heads[..., :half], heads[..., half:])
    )
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = (a * cos - b * sin, a * sin + b * cos)
    if not interleaved:
        return np.concatenate(rotated, axis=-1)
    return np.stack(rotated, axis=-1).reshape(heads.shape)


def attend(q: F32, k: F32, v: F32, scale: float, window: int) -> F32:
    """Attend causally to the last `window` tokens: q, k, v [T, heads, D] -> [T, heads * D]."""
    length, shared = len(q), q.shape[1] // k.shape[1]
    k, v = (np.repeat(one, shared, axis=1) for one in (k, v))
    # Matrix products instead of einsum, because BLAS computes them.
    q, k, v = q.transpose(1, 0, 2), k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    mixed = np.empty_like(q)
    for start in range(0, length, ATTENTION_ROWS):  # blocks, so that few masked scores are computed
        stop, first = min(start + ATTENTION_ROWS, length), max(0, start - window + 1)
        weight = q[:, start:stop] @ k[:, :, first:stop]
        weight *= np.float32(scale)
        ago = np.arange(start, stop)[:, None] - np.arange(first, stop)
        weight += np.where((ago < 0) | (ago >= window), np.float32(-np.inf), np.float32(0))
        weight -= weight.max(axis=-1, keepdims=True)
        np.exp(weight, out=weight)
        weight /= weight.sum(axis=-1, keepdims=True)
        mixed[:, start:stop] = weight @ v[:, first:stop]
    return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(length, -1)


def window_starts(token_ids: Sequence[int], window: int, ends: Sequence[int]) -> list[int]:
    """Return where each token's window starts; no window crosses a document end (id in `ends`)."""
    starts, document = list[int](), 0
    for place, token in enumerate(token_ids):
        starts.append(max(document, place + 1 - window))
        document = place + 1 if token in ends else document
    return starts


def trailing_means(rows: F32, starts: Sequence[int]) -> F32:
    """Return, for each position t, the mean of rows[starts[t]] to rows[t] (inclusive): [T, K]."""
    means = [rows[start : place + 1].mean(axis=0) for place, start in enumerate(starts)]
    return np.stack(means)


def mixture(scores: F32, rows: F32) -> F32:
    """Return sums [T, K] of each token's n rows [T, n * K], weighted by softmax(scores [T, n])."""
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.asarray((shares[:, None] @ rows.reshape(*scores.shape, -1))[:, 0], np.float32)
