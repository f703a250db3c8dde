"""FFN of one layer as graph nodes, for every kind that ModelConfig knows, and per-layer embeddings after it.

stem_edge.numerics.reference has the mathematics. A new kind of FFN is an entry in layers.FFN_TERMS,
or a function here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.ir import CONTRIB, Attribute, GraphError
from stem_edge.graph.layer import LayerGraph, norm
from stem_edge.graph.linear import Products, gather_blocks, vector
from stem_edge.layers import FFN_TERMS
from stem_edge.tables.rows import RecordLayout

# Score of the chosen expert; the others have 0. The operator's softmax must give exactly 1 and 0.
CHOSEN = 100.0


def ffn(layer: LayerGraph, x: str) -> str:
    """Emit the FFN of x [B, T, dim], already normed -> [B, T, dim]."""
    if layer.kind == "hash-moe":
        return _experts(layer, x)
    takes_row = any("row" in terms for terms in FFN_TERMS[layer.kind].values())
    row = row_of(layer) if takes_row else ""
    gate = _sum(layer, "gate", x, row)
    gate = layer.activated(_cut(layer, gate) if layer.shape.sparsity else gate, "silu")
    up = _sum(layer, "up", x, row)
    product = layer.graph.node("Mul", [gate, up], [layer.at + "product"])
    return layer.product("down", "down", product, ("down",))


def _sum(layer: LayerGraph, name: Literal["gate", "up"], x: str, row: str) -> str:
    """Emit the gate or up as FFN_TERMS defines it: W x, the row, or their sum."""
    terms = FFN_TERMS[layer.kind][name]
    parts = [layer.product(name, name, x, (name,))] if "matrix" in terms else []
    parts += [row] if "row" in terms else []
    if len(parts) == 1:
        return parts[0]
    return layer.graph.node("Add", parts, [f"{layer.at}{name}.sum"])


def _cut(layer: LayerGraph, gate: str) -> str:
    """Emit what of a gate [B, T, d_ff] is above its mean by `cutoff` standard deviations, else 0."""
    graph, at, axis = layer.graph, layer.at + "cut", layer.graph.sizes([-1])
    mean = graph.add("ReduceMean", [gate, axis], at + ".mean", keepdims=1)
    above = graph.add("Sub", [gate, mean], at + ".above")
    # The deviation is the length over sqrt(d_ff).
    length = graph.add("ReduceL2", [above, axis], at + ".length", keepdims=1)
    share = graph.float(layer.shape.cutoff / layer.shape.d_ff**0.5)
    least = graph.add("Mul", [length, share], at + ".least")
    return graph.add("Relu", [graph.add("Sub", [above, least], at + ".rest")], at)


def row_of(layer: LayerGraph) -> str:
    """Emit the tokens' rows [B, T, d_ff or ple_width], gathered from the slots of the row cache."""
    graph, layout, name = layer.graph, _layout(layer), layer.at + "row"
    # No shapes, because shape inference of GatherBlockQuantized refuses a symbolic number of slots.
    codes = graph.input(io.row_codes(layer.number), layout.codes_dtype, None)
    if layout.quantized:
        scales = graph.input(io.row_scales(layer.number), np.float32, None)
        names = [codes, scales, io.ROW_ZERO_POINTS]
        row = gather_blocks(graph, names, layer.slot_ids, name, layout.bits, layout.group_size)
    else:
        row = graph.node("Gather", [codes, layer.slot_ids], [name])
        row = graph.node("Cast", [row], [name + ".fp32"], to=1) if layout.bits == 16 else row
    return layer.product("project", "project", row, ("project",)) if layer.config.row_rank else row


def _experts(layer: LayerGraph, x: str) -> str:
    """Emit a mixture of experts that reads each token's expert from its slot.

    The layout is that of the CPU's kernels: gate and up alternate. Raises GraphError for experts in
    16 bits, which those kernels do not have.
    """
    graph, layout, number = layer.graph, _layout(layer), layer.number
    if layout.bits == 16:
        raise GraphError("experts in 16 bits cannot run; use --tables fp32, int8 or int4")
    inner, outer = (
        graph.input(io.row_codes(number, n), layout.codes_dtype, ["slots", *layout.codes_shape(n)])
        for n in (0, 1)
    )
    common: dict[str, Attribute] = {
        "k": 1,
        "normalize_routing_weights": 1,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    chosen, output = _chosen(layer, inner), [layer.at + "experts"]
    if not layout.quantized:
        return graph.node("MoE", [x, chosen, inner, "", outer], output, CONTRIB, **common)
    scales = [
        graph.input(io.row_scales(number, n), np.float32, ["slots", *layout.scales_shape(n)])
        for n in (0, 1)
    ]
    return graph.node(
        "QMoE",
        [x, chosen, inner, scales[0], "", outer, scales[1]],
        output,
        CONTRIB,
        expert_weight_bits=layout.bits,
        block_size=layout.group_size,
        **common,
    )


def _chosen(layer: LayerGraph, codes: str) -> str:
    """Emit routing scores [T, slots]: CHOSEN for the token's slot, 0 for all others."""
    graph, at = layer.graph, layer.at
    values = graph.constant(at + "scores", np.array([0, CHOSEN], np.float32))
    ids = graph.reshape(layer.slot_ids, [-1], at + "slots")
    count = graph.node("Shape", [codes], [at + "slot_count"], start=0, end=1)
    return graph.node("OneHot", [ids, count, values], [at + "chosen"], axis=-1)


def _layout(layer: LayerGraph) -> RecordLayout:
    if layer.layout is None:
        raise ValueError(f"layer {layer.number} takes rows, but there is no layout of rows")
    return layer.layout


def contexts(
    products: Products, config: ModelConfig, embedded: str, layers: Sequence[int]
) -> dict[int, str]:
    """Emit layer -> its context [B, T, ple_width], to which its rows are added.

    All contexts come from one product of embedded [B, T, dim], and are divided by sqrt(2) already.
    """
    graph, width = products.graph, config.ple_width
    at, names = f"layers.{layers[0]}.", [f"layers.{number}.ple_context" for number in layers]
    shape = (len(layers) * width, config.dim)
    x = products.product(at + "ple_context", "ple_context", embedded, tuple(names), shape)
    x = graph.reshape(x, [0, 0, len(layers), width], at + "context.cut")
    weight = vector(graph, products.plan, at + "ple_norm", width, ("ple_norm",))
    # The product is not divided by sqrt(dim), which the norm undoes, so eps must be dim times as
    # large.
    x = norm(graph, x, weight, config.norm_eps * config.dim)
    x = graph.add("Mul", [x, graph.float(0.5**0.5)], at + "context.half")
    x = graph.reshape(x, [0, 0, len(layers) * width], at + "context")
    parts = [f"layers.{number}.context.part" for number in layers]
    # By number instead of sizes, because prepared graphs keep constants in a file that Split
    # cannot read.
    graph.node("Split", [x], parts, axis=-1, num_outputs=len(layers))
    return dict(zip(layers, parts, strict=True))


def ple(layer: LayerGraph, x: str, context: str) -> str:
    """Emit what per-layer embeddings add to x [B, T, dim] -> [B, T, dim]."""
    graph, config, at = layer.graph, layer.config, layer.at + "ple"
    scale = graph.float(float(np.float32(config.ple_scale * 0.5**0.5)))
    row = graph.add("Mul", [row_of(layer), scale], at + ".row")
    mixed = graph.add("Add", [context, row], at + ".mixed")
    gate = layer.activated(layer.product("ple_gate", "ple_gate", x, ("ple_gate",)), "ple.gelu")
    product = graph.add("Mul", [gate, mixed], at + ".product")
    added = layer.product("ple_out", "ple_out", product, ("ple_out",))
    return layer.rms_norm(at + "_post_norm", added, "ple_post_norm", config.norm_eps)
