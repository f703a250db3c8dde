"""Graphs for accelerators, out of the graphs that decode: the same nodes over the same weights.

What must become another type or shape does so in a node, which onnxruntime computes once, when it
loads: float32 weights, norms and scales are cast, and scales that are odd in number are given twice,
for blocks of half the size (stem_edge.graph.device_rows says why). stem_edge.graph.names has what
goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device_rows import Activations, DeviceRows, fits
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import ElementType, Graph, Node
from stem_edge.numerics.quantize import MIN_BLOCK, fitting_block
from stem_edge.tables.rows import RecordLayout

GATHER_BLOCKS, FLOAT_PRODUCT = "GatherBlockQuantized", "FusedMatMul"
HALF, WIDE = ".fp16", ".fp32"  # end the names of what was cast
SYMMETRIC = 0x88  # two zero points of 4 bits


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Why a model has no graphs that keep everything on a device; empty if it can have them."""
    if reason := obstacle_of_layers(config):
        return reason
    if layout is not None and not fits(layout):
        kind = "experts" if config.stem_ffn == "hash-moe" else "rows"
        return f"{kind} of {layout.parts} in groups of {layout.group_size} cannot lie on a device"
    block, groups = _embedding_blocks(config, format)
    if groups % 2 and (format.asymmetric or block == MIN_BLOCK):
        return (
            f"the embedding has {groups} blocks of {block} in 4 bits in a row, an odd number of "
            "which some accelerators refuse; a smaller --block-size or --bits embedding=8 helps"
        )
    return ""


def obstacle_of_layers(config: ModelConfig) -> str:
    """Why only the CPU has graphs of a model's layers; empty if accelerators have."""
    return "" if config.plain else "layers as Gemma 4 has them run on the CPU only"


def _embedding_blocks(config: ModelConfig, format: BackboneFormat) -> tuple[int, int]:
    """Size and number of blocks of a 4-bit embedding; of another 0."""
    block = fitting_block(config.dim, format.block_size)
    return (block, config.dim // block) if format.bits("embedding") == 4 else (0, 0)


def derive(graph: Graph, layout: RecordLayout | None, activations: Activations) -> Graph:
    """The variant of a graph that decodes, of a model without `obstacle`; takes the graph over."""
    rows = DeviceRows(layout, activations) if layout is not None else None
    for node in graph.nodes:  # providers that know the level would round activations to int8
        node.attributes.pop("accuracy_level", None)
    before = _even_blocks(graph, rows) + _turned_matrices(graph)
    if activations == "fp16":
        before = _halve(graph, before)
    graph.nodes = before + graph.nodes
    return graph


def _even_blocks(graph: Graph, rows: DeviceRows | None) -> list[Node]:
    """Blocks of rows as a device has them, and an even number of those of the embedding."""
    before: list[Node] = []
    for node in graph.nodes:
        if node.op != GATHER_BLOCKS:
            continue
        if node.inputs[1] == io.SLOT_IDS and rows is not None:
            node.attributes["block_size"] = rows.group_size
        elif node.attributes["bits"] == 4 and graph.tensors[node.inputs[2]].dims[1] % 2:
            before += _doubled(graph, node)
    return before


def _doubled(graph: Graph, node: Node) -> list[Node]:
    """Nodes that give each scale of a matrix twice, and its zero points, all alike."""
    scales, points = node.inputs[2:]
    lines, groups = graph.tensors[scales].dims
    node.attributes["block_size"] = node.size("block_size") // 2
    del graph.tensors[points]
    made = Graph(tensors=graph.tensors)
    apart = made.add("Unsqueeze", [scales, made.sizes([2])], f"{scales}.apart")
    twice = made.add("Concat", [apart, apart], f"{scales}.twice", axis=2)
    node.inputs[2] = made.reshape(twice, [lines, 2 * groups], f"{scales}.flat")
    # As many bytes as there are pairs.
    made.fill(made.sizes([lines, groups]), points, np.array([SYMMETRIC], np.uint8))
    return made.nodes


def _turned_matrices(graph: Graph) -> list[Node]:
    """Products with float matrices as every provider has them: with the matrix turned before."""
    before = []
    for node in graph.nodes:
        if node.op == FLOAT_PRODUCT:
            turned = node.inputs[1] + ".turned"
            before.append(Node("Transpose", [node.inputs[1]], [turned]))
            node.op, node.domain, node.attributes = "MatMul", "", {}
            node.inputs = [node.inputs[0], turned]
    return before


def _halve(graph: Graph, before: list[Node]) -> list[Node]:
    """Activations in float16. Returns the nodes that come first: those before, and casts.

    Matrices of floats, of a backbone that is to be exact, stay float32, and so do their products:
    some accelerators sum up float16 in float16.
    """
    turned = {node.inputs[0] for node in before if node.op == "Transpose"}
    tensors = [n for n, tensor in graph.tensors.items() if tensor.type == ElementType.FLOAT]
    floats = [name for name in tensors if name not in turned]
    rows = {node.inputs[0] for node in graph.nodes if io.SLOT_IDS in node.inputs}
    casts = [_cast(name, name + HALF, ElementType.FLOAT16) for name in floats]
    _rename_inputs([*before, *graph.nodes], {name: name + HALF for name in floats})
    nodes = _rows_halved(graph)
    for values in (graph.inputs, graph.outputs):
        for name, value in values.items():
            if value.type == ElementType.FLOAT and name not in {io.LOGITS, *rows}:
                values[name] = replace(value, type=ElementType.FLOAT16)
    if nodes[-1].outputs[0] == io.LOGITS and nodes[-1].inputs[0].endswith(WIDE):
        nodes.pop()  # it is float32 as it comes
        nodes[-1].outputs[0] = io.LOGITS
    elif nodes[-1].outputs[0] == io.LOGITS:
        nodes[-1].outputs[0] = io.LOGITS + HALF
        nodes.append(_cast(io.LOGITS + HALF, io.LOGITS, ElementType.FLOAT))
    graph.nodes = nodes
    return casts + before


def _rows_halved(graph: Graph) -> list[Node]:
    """The nodes, with rows that are stored as floats in float16 once they are gathered."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "Cast":  # of rows that are float16 already
            nodes[-1].outputs[0] = node.outputs[0]
            continue
        if node.op == "MatMul":
            nodes += _in_float32(node)
            continue
        nodes.append(node)
        if node.op != "Gather" or io.SLOT_IDS not in node.inputs:
            continue
        if graph.inputs[node.inputs[0]].type == ElementType.FLOAT:
            name = node.outputs[0]
            node.outputs[0] = name + ".stored"
            nodes.append(_cast(node.outputs[0], name, ElementType.FLOAT16))
    return nodes


def _in_float32(node: Node) -> list[Node]:
    """A product of activations in float16, computed in float32."""
    wide, name = node.outputs[0] + WIDE, node.outputs[0]
    first = _cast(node.inputs[0], wide + ".input", ElementType.FLOAT)
    node.inputs[0] = first.outputs[0]
    node.outputs[0] = wide
    return [first, node, _cast(wide, name, ElementType.FLOAT16)]


def _rename_inputs(nodes: Iterable[Node], names: dict[str, str]) -> None:
    for node in nodes:
        node.inputs = [names.get(name, name) for name in node.inputs]


def _cast(source: str, name: str, to: ElementType) -> Node:
    return Node("Cast", [source], [name], attributes={"to": int(to)})
