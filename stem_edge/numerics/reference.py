"""The model in plain numpy, slow but simple: tests compare other implementations with it.

Weights are read a few rows at a time, so that no caller must hold a whole model in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.layers import FFN_TERMS
from stem_edge.numerics import altup
from stem_edge.numerics.arithmetic import (
    Observer,
    activated,
    attend,
    linear,
    logistic,
    mixture,
    normalized,
    pick,
    rms_norm,
    rotate,
    silu,
    sparse_gate,
    trailing_means,
    window_starts,
)
from stem_edge.numerics.matrix import ArrayMatrix, IndexedMatrix, Matrix, whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_tables


def embed(config: ModelConfig, backbone: Mapping[str, Matrix], token_ids: Sequence[int]) -> F32:
    """Return the hidden states [T, hidden_width] before the first layer.

    backbone: the tensors that ModelConfig.backbone_shapes() names.
    """
    x = _embedded(config, backbone, token_ids)
    return altup.expanded(config, backbone, x) if config.streams > 1 else x


def _embedded(config: ModelConfig, backbone: Mapping[str, Matrix], token_ids: Sequence[int]) -> F32:
    return pick(backbone["embedding"], token_ids) * np.float32(config.embedding_scale)


class Tokens:
    """State that layers need in addition to hidden states: ids, RoPE tables, shared K and V."""

    def __init__(
        self, config: ModelConfig, backbone: Mapping[str, Matrix], token_ids: Sequence[int]
    ) -> None:
        self.ids = token_ids
        self.row_ids = token_ids  # ids of the table rows to look up, token by token
        if config.ngram_order:
            from stem_edge.numerics.ngram_hash import hash_of  # only for models with n-grams

            self.row_ids = hash_of(config).keys(token_ids).ravel().tolist()
        self.starts = window_starts(token_ids, config.row_window, config.eos_ids)
        self.ropes = {rope: rope_tables(rope, len(token_ids)) for rope in config.ropes}
        # Layers whose K and V later layers read; only their K and V stay in memory.
        borrowing = config.layers[config.own_kv_layers :]
        self.lenders = frozenset(layer.kv_layer for layer in borrowing)
        self.kv: dict[int, tuple[F32, F32]] = {}  # lender -> K and V [T, heads, head_dim]
        self.ple: tuple[F32, Matrix] | None = None  # per-layer embeddings: inputs, norm
        if config.ple_width:
            self.ple = _embedded(config, backbone, token_ids), backbone["ple_norm"]


def layer_forward(
    config: ModelConfig,
    layer: int,
    backbone: Mapping[str, Matrix],
    tables: Mapping[int, Matrix],
    x: F32,
    tokens: Tokens,
    observe: Observer = lambda name, x: None,
) -> F32:
    """Return the hidden states [T, hidden_width] after one layer. x: hidden states before it.

    Reads only this layer's tensors, so that a model can run in the memory of one layer.
    """
    at, many = f"layers.{layer}.", config.streams > 1
    weights = {name: backbone[at + name] for name in config.layer_shapes(layer)}
    ranged = [name for name in weights if at + name in config.ranges]
    weights |= {f"{name}.range": steps_of(config, at + name) for name in ranged}
    kind, rows = config.ffn_kind(layer), None
    if layer in config.stem_layers and kind != "hash-moe":
        source = config.row_layers[0] if config.ngram_order else layer
        rows = pick(tables[source], tokens.row_ids)
    if config.ngram_order and rows is not None:
        from stem_edge.numerics.ngrams import with_ngrams

        x, rows = with_ngrams(config, layer, weights, x, rows, observe), None
    streams = altup.predicted(config, weights, x) if many else x[:, None]  # [T, streams, dim]
    active = streams[:, config.active_stream]
    active = _attended(config, layer, weights, active, tokens, observe)
    normed = rms_norm(active, weights["ffn_norm"], config.norm_eps)
    if kind == "hash-moe":
        result = _experts(config, normed, tables[layer], tokens.ids)
    else:
        if rows is not None and config.row_window:
            rows = trailing_means(rows, tokens.starts)
        result = _ffn(config, layer, weights, normed, rows, observe)
    active = active + _after(config, weights, "ffn_post_norm", result)
    streams = altup.corrected(config, weights, streams, active) if many else active[:, None]
    if kind == "ple" and rows is not None:
        gated = streams[:, config.active_stream]
        added = _ple(config, layer, weights, gated, rows, tokens, observe)
        streams[:, int(many) :] += added[:, None]
    x = streams.reshape(x.shape)
    return x * whole(weights["layer_scale"]) if config.layer_scale else x


def _attended(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Matrix],
    x: F32,
    tokens: Tokens,
    observe: Observer,
) -> F32:
    """Return x [T, dim] + attention; with LAuReL, (x + attention + LAuReL) / sqrt(2)."""
    at = f"layers.{layer}."
    normed = rms_norm(x, weights["attention_norm"], config.norm_eps)
    observe(at + "qkv", normed)
    mixed = _attention(config, layer, weights, normed, tokens)
    observe(at + "wo", mixed)
    x = x + _after(config, weights, "attention_post_norm", linear(mixed, weights, "wo"))
    if not config.laurel_rank:
        return x
    beside = altup.laurel(config, at, weights, normed, observe)
    return np.asarray((x + beside) / np.sqrt(np.float32(2)), np.float32)


def head_forward(
    config: ModelConfig,
    backbone: Mapping[str, Matrix],
    x: F32,
    observe: Observer = lambda name, x: None,
) -> F32:
    """Return the logits [T, V] of hidden states x [T, hidden_width] after the last layer."""
    if config.streams > 1:
        x = altup.merged(config, backbone, x, observe)
    normed = rms_norm(x, backbone["norm"], config.norm_eps)
    observe("head", normed)
    head = {"head": backbone["embedding" if config.tied_head else "head"]}
    if "head" in config.biases:
        head["head.bias"] = backbone["head.bias"]
    if "head" in config.ranges:
        head["head.range"] = steps_of(config, "head")
    logits = linear(normed, head, "head")
    if cap := np.float32(config.logit_softcap):  # in place, because logits can be large
        logits = np.divide(logits, cap, out=logits)
        np.multiply(np.tanh(logits, out=logits), cap, out=logits)
    return logits


def steps_of(config: ModelConfig, name: str) -> Matrix:
    """Return the step sizes [2] that a matrix's input and output are rounded to; 0: not rounded."""
    return ArrayMatrix(np.array(config.ranges[name], np.float32))


def _attention(
    config: ModelConfig, number: int, weights: Mapping[str, Matrix], x: F32, tokens: Tokens
) -> F32:
    """Return layer `number`'s causal attention of x [T, dim], without the output projection."""
    layer, length = config.layer(number), len(x)
    cos, sin = tokens.ropes[layer.rope]

    def heads(name: str) -> F32:
        return linear(x, weights, name).reshape(length, -1, layer.head_dim)

    def turned(name: str) -> F32:
        projected = heads("w" + name)
        if config.qk_norm_eps is not None:
            projected = rms_norm(projected, weights[f"{name}_norm"], config.qk_norm_eps)
        return rotate(projected, cos, sin, config.rope_interleaved)

    if layer.kv_layer == number:
        v = heads("wv")
        own = turned("k"), normalized(v, config.qk_norm_eps or 0.0) if config.v_norm else v
        if number in tokens.lenders:
            tokens.kv[number] = own
    else:
        own = tokens.kv[layer.kv_layer]
    return attend(
        turned("q"), *own, config.attention_scale or layer.head_dim**-0.5, layer.window or length
    )


def _ffn(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Matrix],
    x: F32,
    rows: F32 | None,
    observe: Observer,
) -> F32:
    """Return the FFN of x [T, dim]: W_down (act(gate) * up); FFN_TERMS defines gate and up.

    If tokens have several rows, a router mixes them. Sparse layers use sparse_gate.
    """
    at = f"layers.{layer}."
    observe(at + "gate", x)
    if rows is not None and config.row_experts:
        rows = mixture(linear(x, weights, "router"), rows)
    if rows is not None and config.row_rank:
        observe(at + "project", rows)
        rows = linear(rows, weights, "project")
    sums = {}
    for name, terms in FFN_TERMS[config.ffn_kind(layer)].items():
        parts = [linear(x, weights, name)] if "matrix" in terms else []
        parts += [rows] if "row" in terms and rows is not None else []
        if "mix" in terms:
            share = logistic(whole(weights["mix"]))
            parts = [parts[0] * (1 - share), parts[1] * share]
        sums[name] = sum(parts[1:], parts[0])
    own = config.layer(layer)
    gate = sparse_gate(sums["gate"], own.cutoff) if own.sparsity else sums["gate"]
    product = activated(config.activation, gate) * sums["up"]
    observe(at + "down", product)
    return linear(product, weights, "down")


def _ple(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, Matrix],
    x: F32,
    rows: F32,
    tokens: Tokens,
    observe: Observer,
) -> F32:
    """Return the per-layer embedding term for x [T, dim]: norm(W_out (act(W_gate x) * p)).

    p = (norm(W_context x0 / sqrt(dim)) + row) / sqrt(2), with x0 the input of the first layer.
    """
    at, scale = f"layers.{layer}.", np.float32(config.ple_scale)
    if tokens.ple is None:
        raise ValueError("the model has no per-layer embeddings")
    embedded, norm = tokens.ple
    observe(at + "ple_context", embedded)
    context = linear(embedded, weights, "ple_context") / np.sqrt(np.float32(config.dim))
    mixed = (rms_norm(context, norm, config.norm_eps) + rows * scale) / np.sqrt(np.float32(2))
    if config.ple_gate_scale:
        x = x * whole(weights["ple_gate_scale"])
    observe(at + "ple_gate", x)
    product = activated(config.activation, linear(x, weights, "ple_gate")) * mixed
    observe(at + "ple_out", product)
    return rms_norm(linear(product, weights, "ple_out"), weights["ple_post_norm"], config.norm_eps)


def _experts(config: ModelConfig, x: F32, table: Matrix, token_ids: Sequence[int]) -> F32:
    """Return expert FFNs of x [T, dim]: a token's table row holds the weights of its expert."""
    results, records = np.empty_like(x), np.asarray(token_ids)
    if isinstance(table, IndexedMatrix):
        records, table = table.index[records], table.matrix
    inner, outer = config.row_parts()
    for record in np.unique(records).tolist():  # one at a time: each is as large as a whole FFN
        row, mine = table.rows(record, record + 1)[0], records == record
        both = x[mine] @ row[: inner[0] * inner[1]].reshape(inner).T
        product = silu(both[:, 0::2]) * both[:, 1::2]
        results[mine] = product @ row[inner[0] * inner[1] :].reshape(outer).T
    return results


def _after(config: ModelConfig, weights: Mapping[str, Matrix], name: str, x: F32) -> F32:
    return rms_norm(x, weights[name], config.norm_eps) if config.post_norms else x
