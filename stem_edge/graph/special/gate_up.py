"""One product for gate and up of an FFN, in the graphs that are saved with repacked weights.

Each product costs a start of onnxruntime's threads, so a small model decodes faster with one. In a
bundle's weight file, gate and up are apart; the repacked copy has them together.
"""

from __future__ import annotations

from dataclasses import replace

from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.linear import SPLIT_VALUES


def gate_up_joined(graph: Graph) -> Graph:
    """Copy a graph with one product for each layer's gate and up, and the same results bit for bit.

    Only small matrices in one piece that are quantized alike are joined: large ones gain little.
    """
    made = replace(graph, nodes=[], tensors=dict(graph.tensors))
    products = {node.outputs[0]: node for node in graph.nodes if node.op == "MatMulNBits"}
    joined = set[str]()  # results of up
    for node in graph.nodes:
        up = products.get(node.outputs[0].replace(".gate", ".up"), node)
        if up is not node and _alike(graph, node, up):
            _join(made, node, up)
            joined.add(up.outputs[0])
        elif node.outputs[0] not in joined:
            made.nodes.append(node)
    return made


def _alike(graph: Graph, gate: Node, up: Node) -> bool:
    whole, form = gate.outputs[0].endswith(".gate"), gate.attributes
    # onnxruntime computes a product and its bias in one node, which rounds differently.
    biased = any(one.outputs[0] + ".bias" in graph.tensors for one in (gate, up))
    if not whole or biased or gate.inputs[0] != up.inputs[0] or form != up.attributes:
        return False
    # Kernels round the columns beyond a multiple of 4 differently, and 2-bit ones all columns in some sizes.
    exact = form["N"] % 16 == 0 and form["bits"] > 2
    return bool(exact and 2 * form["N"] * form["K"] <= SPLIT_VALUES)


def _join(graph: Graph, gate: Node, up: Node) -> None:
    """Emit the product of x with the rows of both matrices, and the split of its result."""
    x, *names = gate.inputs
    result, *joined = [one.replace(".gate", ".gate_up") for one in (gate.outputs[0], *names)]
    for name, *both in zip(joined, names, up.inputs[1:], strict=True):
        parts = tuple(graph.tensors.pop(one) for one in both)
        dims = 2 * parts[0].dims[0], *parts[0].dims[1:]
        graph.tensors[name] = replace(parts[0], name=name, dims=dims, offset=-1, parts=parts)
    attributes = gate.attributes | {"N": 2 * gate.attributes["N"]}
    graph.nodes.append(replace(gate, inputs=[x, *joined], outputs=[result], attributes=attributes))
    graph.node("Split", [result], [gate.outputs[0], up.outputs[0]], axis=-1, num_outputs=2)
