"""A mixture of experts as graph nodes, where a token's id chooses its expert."""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ffn import rows_layout
from stem_edge.graph.ir import CONTRIB, Attribute, GraphError
from stem_edge.graph.layer import LayerGraph

# Score of the chosen expert, if all others have 0: large enough for a softmax of exactly 1 and 0.
CHOSEN = 100.0


def experts(layer: LayerGraph, x: str) -> str:
    """Emit expert FFNs of x [B, T, dim]; a token's row cache slot holds its expert's weights.

    Rows of gate and up alternate, as onnxruntime's kernels expect. Raises GraphError for 16-bit experts,
    which these kernels do not support.
    """
    graph, layout, number = layer.graph, rows_layout(layer), layer.number
    if layout.bits == 16:
        raise GraphError("experts in 16 bits cannot run; use --rows fp32, int8 or int4")
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
    """Emit scores [T, slots]: CHOSEN in the slot of a token's expert, else 0. codes: of slots."""
    graph, at = layer.graph, layer.at
    values = graph.constant(at + "scores", np.array([0, CHOSEN], np.float32))
    ids = graph.reshape(layer.slot_ids, [-1], at + "slots")
    count = graph.node("Shape", [codes], [at + "slot_count"], start=0, end=1)
    return graph.node("OneHot", [ids, count, values], [at + "chosen"], axis=-1)
