"""Large float32 matrices multiplied in blocks of rows, to the same bits.

onnxruntime packs a matrix in memory: a head of 128,256 rows would take 1 GB at once, a block 16 MB.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from stem_edge.graph.ir import CONTRIB, Graph, Node, Tensor
from stem_edge.graph.weight_plan import LARGE_ALIGNMENT

BLOCK_NBYTES = 1 << 24


def in_blocks(graph: Graph) -> Graph:
    """Return a graph whose float32 matrices of more than two blocks are in tensors of one block."""
    made = replace(graph, nodes=[], tensors=dict(graph.tensors))
    for node in graph.nodes:
        tensor = graph.tensors.get(node.inputs[1]) if node.op == "FusedMatMul" else None
        if tensor is None or tensor.data is not None or tensor.nbytes <= 2 * BLOCK_NBYTES:
            made.nodes.append(node)
            continue
        del made.tensors[tensor.name]
        parts = [_product(made, node, block) for block in _blocks(tensor)]
        made.add("Concat", parts, node.outputs[0], axis=-1)
    return made


def _product(graph: Graph, node: Node, block: Tensor) -> str:
    inputs, name = [node.inputs[0], graph.weight(block)], f"{block.name}.product"
    return graph.node(node.op, inputs, [name], CONTRIB, **node.attributes)


def _blocks(tensor: Tensor) -> list[Tensor]:
    """Return blocks of the rows of a tensor [N, K], each beginning where files can be mapped."""
    rows = tensor.dims[0]
    row_nbytes = tensor.nbytes // rows
    unit = LARGE_ALIGNMENT // gcd(LARGE_ALIGNMENT, row_nbytes)
    step = max(unit, BLOCK_NBYTES // row_nbytes // unit * unit)
    return [
        replace(
            tensor,
            name=f"{tensor.name}.{number}",
            dims=(min(step, rows - at), *tensor.dims[1:]),
            offset=tensor.offset + at * row_nbytes,
        )
        for number, at in enumerate(range(0, rows, step))
    ]
