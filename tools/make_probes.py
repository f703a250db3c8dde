"""Writes the small graphs that stem_edge.measuring.rates_ort times, into the package.

    python tools/make_probes.py [FOLDER]

Each is the operator that a decode step spends its time in, at sizes beyond any processor's cache.
Weights are constants that onnxruntime makes while it loads the graph, so that a graph of 128 MB is a
file of some kilobytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from stem_edge.graph.encoder import IR_VERSION, OPSET
from stem_edge.graph.ir import CONTRIB
from stem_edge.measuring.rates import MATRIX_SHAPE
from stem_edge.measuring.rates_ort import ATTENTION, ATTENTION_SHAPE, PAIRS, PROBES, matmul_probe


class Probe:
    """A graph whose constants are all filled with one value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.shapes: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def filled(self, name: str, kind: int, value: float, shape: list[int]) -> str:
        """A tensor of one value, which onnxruntime takes for a constant."""
        size = helper.make_tensor(name + ".shape", TensorProto.INT64, [len(shape)], shape)
        self.shapes.append(size)
        tensor = helper.make_tensor("value", kind, [1], [value])
        node = helper.make_node("ConstantOfShape", [size.name], [name], name=name, value=tensor)
        self.nodes.append(node)
        return name

    def node(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        """An operator of onnxruntime's own."""
        made = helper.make_node(op, inputs, outputs, name=outputs[0], domain=CONTRIB, **attributes)
        self.nodes.append(made)

    def write(self, path: Path) -> None:
        """The same bytes every time."""
        graph = helper.make_graph(self.nodes, "probe", self.inputs, self.outputs, self.shapes)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)],
            ir_version=IR_VERSION,
            producer_name="stem-edge",
        )
        path.write_bytes(model.SerializeToString(deterministic=True))


def matmul(bits: int, block: int) -> Probe:
    """x [1, 1, K] through pairs of matrices [N, K] and [K, N]."""
    probe, x = Probe(), "x"
    shape = [1, 1, MATRIX_SHAPE[0]]
    probe.inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    for pair in range(PAIRS[bits]):
        for width, rows in (MATRIX_SHAPE, MATRIX_SHAPE[::-1]):
            at = f"{pair}.{width}"
            scale = 1e-3 * (1 + pair)  # equal constants would become one, and stay in the cache
            if bits == 32:
                weight = probe.filled(at + ".weight", TensorProto.FLOAT, scale, [rows, width])
                probe.node("FusedMatMul", [x, weight], [at], transB=1)
            else:
                codes = [rows, width // block, block * bits // 8]
                names = [
                    probe.filled(at + ".codes", TensorProto.UINT8, 0x77 + pair, codes),
                    probe.filled(at + ".scales", TensorProto.FLOAT, scale, [rows * width // block]),
                ]
                probe.node(
                    "MatMulNBits",
                    [x, *names],
                    [at],
                    K=width,
                    N=rows,
                    bits=bits,
                    block_size=block,
                    accuracy_level=4,
                )
            x = at
    probe.outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, shape))
    return probe


def attention() -> Probe:
    """One new token attending to all others, in several layers after another."""
    layers, heads, kv_heads, width, tokens = ATTENTION_SHAPE
    probe, mixed = Probe(), "qkv"
    float_input = [("qkv", [1, 1, (heads + 2 * kv_heads) * width])]
    kv = [1, kv_heads, tokens, width]
    float_input += [(f"{name}{n}", kv) for n in range(layers) for name in ("keys", "values")]
    float_input += [(name, [tokens, width // 2]) for name in ("cos", "sin")]
    value = helper.make_tensor_value_info
    probe.inputs = [value(name, TensorProto.FLOAT, shape) for name, shape in float_input]
    probe.inputs += [
        value("seqlens_k", TensorProto.INT32, [1]),
        value("total", TensorProto.INT32, []),
    ]
    for n in range(layers):
        names = [mixed, "", "", f"keys{n}", f"values{n}", "seqlens_k", "total", "cos", "sin"]
        out = [f"mixed{n}", f"new_keys{n}", f"new_values{n}"]
        probe.node(
            "GroupQueryAttention", names, out, num_heads=heads, kv_num_heads=kv_heads, do_rotary=1
        )
        probe.outputs.append(value(out[0], TensorProto.FLOAT, [1, 1, heads * width]))
        probe.outputs += [value(name, TensorProto.FLOAT, kv) for name in out[1:]]
    return probe


def main() -> None:
    """Write all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=PROBES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    attention().write(folder / ATTENTION)
    for bits, block in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (32, 0)):
        matmul(bits, block).write(folder / matmul_probe(bits, block))


if __name__ == "__main__":
    main()
