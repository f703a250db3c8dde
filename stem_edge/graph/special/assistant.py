"""Graph of an assistant: a small model that drafts tokens from keys and values of its target model.

Inputs: the last token's embedding in the target, and the target's hidden state that this token was sampled
from. Outputs: logits of the next token, and a hidden state for drafting the token after it. The layers
compute queries only. All drafts that follow a token use its position, for which no keys are cached yet.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.attention import attended, caches
from stem_edge.graph.ffn import ffn
from stem_edge.graph.formats import ASSISTANT_DATA, BACKBONE_DATA, Assistant, BackboneFormat
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.kv import KvType
from stem_edge.graph.layer import LayerGraph, norm
from stem_edge.graph.linear import Products
from stem_edge.graph.parts.heads import borrowing
from stem_edge.graph.weight_plan import Named, WeightPlan, place_peaks
from stem_edge.layers import Layer, Rope

IN, OUT, CLUSTERS, ORDER = "in", "out", "clusters", "order"  # tensors that other models lack


def drafting(
    assistant: Assistant, target: ModelConfig, format: BackboneFormat, kv: KvType = "fp32"
) -> tuple[Graph, WeightPlan]:
    """Build an assistant's graph and the layout of its weight file.

    format, kv: weights and KV cache type of the target. Raises GraphError if a format cannot be
    built, and ValueError if the assistant does not fit the target.
    """
    model, graph, plan = assistant.model, Graph(), WeightPlan(ASSISTANT_DATA)
    products = Products(graph, plan, assistant.format)
    cache = place_peaks(WeightPlan(BACKBONE_DATA), target, format, kv)
    graph.input(io.POSITIONS, np.int64, [1, 1])
    both = [graph.input(name, np.float32, [1, 1, target.dim]) for name in (io.EMBEDDED, io.STATE)]
    joined, shape = graph.add("Concat", both, "joined", axis=-1), (model.dim, 2 * target.dim)
    residual = products.product(IN, "assistant", joined, (IN,), shape)
    for number, lender in lenders(assistant, target).items():
        layer = LayerGraph(model, None, products, number, cache)
        x, residual = layer.add_norm("attention_norm", residual, "", "qkv")
        mixed = layer.post_norm("attention_post_norm", _attention(layer, x, target, lender))
        x, residual = layer.add_norm("ffn_norm", residual, mixed, "gate")
        residual = layer.scaled(residual, layer.post_norm("ffn_post_norm", ffn(layer, x)))
    weight = products.vector("norm", model.dim)
    normed, shape = norm(graph, residual, weight, model.norm_eps), (target.dim, model.dim)
    state = products.product(io.NEW + io.STATE, "assistant", normed, (OUT,), shape)
    graph.output(state, np.float32, [1, 1, target.dim])
    _head(products, assistant, normed)
    return graph, plan


def lenders(assistant: Assistant, target: ModelConfig) -> dict[int, int]:
    """Return assistant layer -> target layer whose keys and values it reads. Raises ValueError."""
    kinds = {_kind(layer): layer.kv_layer for layer in target.layers[: target.own_kv_layers]}
    model, clusters, best = assistant.model, assistant.clusters, assistant.best
    own, ids = range(model.own_kv_layers, model.n_layers), model.vocab_size
    if strange := [n for n in own if _kind(model.layer(n)) not in kinds]:
        raise ValueError(f"its layers {strange} are of kinds that the model does not have")
    fit = not ids % clusters and 0 < best <= clusters if clusters else not best
    if ids != target.vocab_size or not fit:
        raise ValueError(
            f"it has {ids} tokens in {clusters} clusters and scores {best} of these; the model has "
            f"{target.vocab_size} tokens"
        )
    if max(model.streams, target.streams) > 1 or model.stem_layers:
        raise ValueError("it has rows, or one of the two has streams")
    return {number: kinds[_kind(model.layer(number))] for number in own}


def _kind(layer: Layer) -> tuple[Rope, int, int]:
    return layer.rope, layer.window, layer.n_kv_heads


def scored(assistant: Assistant) -> int:
    """Return the number of tokens for which the assistant's head computes logits."""
    size = assistant.model.vocab_size
    return assistant.best * (size // assistant.clusters) if assistant.clusters else size


def with_states(graph: Graph, target: ModelConfig) -> None:
    """Make the input of the target's head a graph output, because the assistant reads it."""
    if any(io.STATES in node.outputs for node in graph.nodes):
        graph.output(io.STATES, np.float32, [graph.sequences, "n", target.dim])


def _attention(layer: LayerGraph, x: str, target: ModelConfig, lender: int) -> str:
    """Emit attention of normed x [1, 1, dim] to keys and values of the target's layer `lender`."""
    graph, own = layer.graph, layer.shape
    prefix, width = io.WINDOW if own.window else "", io.head_width(own)
    qkv = borrowing(layer, layer.product("qkv", "qkv", x, ("wq",)))
    updated = [f"{io.NEW}{name}{lender}.{layer.number}" for name in (io.KEYS, io.VALUES)]
    cached, updated = caches(layer, prefix, lender, updated, borrowed=True)
    lengths = [
        graph.input(prefix + io.SEQLENS_K, np.int32, [1]),
        graph.input(prefix + io.TOTAL_LENGTH, np.int32, []),
    ]
    names = io.rope_names(target, own)
    ropes = [graph.input(name, np.float32, ["context", width // 2]) for name in names]
    inputs = [*qkv, *cached, *lengths, *ropes, io.POSITIONS]
    # One more, as in transformers, where the current token, which has no keys, does not count.
    return attended(layer, inputs, updated, lender, own.window + 1 if own.window else 0)


def _head(products: Products, assistant: Assistant, x: str) -> None:
    """Emit logits of all tokens or, if the assistant divides them into clusters, of some tokens.

    These are the tokens of the clusters with the best scores. Emits their ids, too.
    """
    graph, plan, model = products.graph, products.plan, assistant.model
    shape, count = (model.vocab_size, model.dim), assistant.clusters
    if not count:
        graph.output(io.LOGITS, np.float32, [1, 1, model.vocab_size])
        products.product(io.LOGITS, "head", x, ("embedding",), shape)
        return
    size = model.vocab_size // count
    near = products.product(CLUSTERS, "assistant", x, (CLUSTERS,), (count, model.dim))
    best = [f"{CLUSTERS}.values", f"{CLUSTERS}.best"]
    graph.node("TopK", [near, graph.sizes([assistant.best])], best, axis=-1)
    order = plan.place(ORDER, np.int32, (count, size))
    plan.items.append(Named(order))
    chosen = graph.add("Gather", [graph.weight(order), best[1]], f"{CLUSTERS}.tokens", axis=0)
    ids, count = graph.reshape(chosen, [1, scored(assistant)], io.SCORED), scored(assistant)
    graph.output(ids, np.int32, [1, count])
    rows = products.rows(ids, "embedding.rows", shape)
    graph.output(io.LOGITS, np.float32, [1, 1, count])
    graph.node("FusedMatMul", [x, rows], [io.LOGITS], CONTRIB, transB=1)
