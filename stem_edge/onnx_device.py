"""Operators that the graphs for devices may have, fp32 and fp16: as stem_edge.onnx_operators."""

from __future__ import annotations

from stem_edge import graph_io as io
from stem_edge import onnx_rules as rules
from stem_edge.onnx_file import MAX_NODE_VALUES
from stem_edge.onnx_operators import CONTRIB, Operator
from stem_edge.onnx_operators import OPERATORS as PLAIN

KEPT = ["Add", "Div", "Mul", "Reshape", "SimplifiedLayerNormalization", "Split", "Tanh"]
KEPT_FUSED = [
    *["GatherBlockQuantized", "GroupQueryAttention", "QuickGelu"],
    "SkipSimplifiedLayerNormalization",
]
PARTS = range(1, MAX_NODE_VALUES)
PRODUCT = PLAIN[CONTRIB, "MatMulNBits"]
# Graphs that decode.
OPERATORS: dict[tuple[str, str], Operator] = {
    **{("", name): PLAIN["", name] for name in KEPT},
    **{(CONTRIB, name): PLAIN[CONTRIB, name] for name in KEPT_FUSED},
    ("", "Cast"): Operator(rules.cast, (1,), {"to": (1, 10)}),
    ("", "Concat"): Operator(rules.concat, tuple(PARTS[1:]), {"axis": (-1, 2)}),
    ("", "ConstantOfShape"): Operator(rules.constant_points, (1,), {"value": tuple}),
    ("", "Gather"): Operator(rules.gather, (2,), {}, {"axis": (1,)}),
    ("", "MatMul"): Operator(rules.product, (2,)),
    ("", "Transpose"): Operator(rules.transpose, (1,)),
    ("", "Unsqueeze"): Operator(rules.unsqueeze, (2,)),
    (CONTRIB, "MatMulNBits"): PRODUCT._replace(
        attributes={n: a for n, a in PRODUCT.attributes.items() if n != "accuracy_level"}
    ),
}
# Graphs that serve a device's memory.
SERVING: dict[str, dict[tuple[str, str], Operator]] = {
    io.ROWS: {
        ("", "Split"): Operator(rules.split_words, (2,), {"axis": (1,)}, outputs=PARTS),
        ("", "ScatterND"): Operator(rules.scatter, (3,)),
    },
    io.TOP: {("", "TopK"): Operator(rules.top, (2,), outputs=2)},
}
