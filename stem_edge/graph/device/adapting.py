"""Device variants "fp32" and "fp16" of the graphs that decode, over the same weights.

Weights that need another type or shape get it from nodes with constant inputs, which onnxruntime
computes once, while it loads: norms and scales are cast, and an odd number of scales is doubled,
for blocks of half the size (stem_edge.graph.device.rows gives the reason). stem_edge.graph.names
lists inputs and outputs. Zero points of 4 bits are stored as MatMulNBits reads them: each row ends with a
byte. ONNX has no such padding, so nodes take it out of rows with an odd number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device.rows import Activations, DeviceRows, fits
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import ElementType, Graph, Node
from stem_edge.numerics.quantize import MIN_BLOCK, fitting_block
from stem_edge.tables.rows import RecordLayout

LOW, SHIFT = np.array(15, np.uint8), np.array(4, np.uint8)


def halves(graph: Graph, points: str) -> tuple[str, str]:
    """Emit the lower and the upper zero point of each byte, as uint8."""
    low = graph.add("BitwiseAnd", [points, graph.constant("nibble", LOW)], points + ".low")
    high = _shift(graph, points, "RIGHT", points + ".high")
    return low, high


def doubled(graph: Graph, point: str) -> str:
    """Emit bytes [..., n] that hold each of the zero points twice."""
    upper = _shift(graph, point, "LEFT", point + ".upper")
    return graph.add("BitwiseOr", [point, upper], point + ".twice")


def joined(graph: Graph, low: str, high: str, shape: tuple[int, int], name: str) -> str:
    """Emit the values [rows, groups], uint8, of bytes that held two each; drop the padding."""
    rows, groups = shape
    nbytes = -(-groups // 2)
    apart = [graph.reshape(half, [rows, nbytes, 1], half + ".apart") for half in (low, high)]
    pairs = graph.add("Concat", apart, name + ".pairs", axis=-1)
    flat = graph.reshape(pairs, [rows, 2 * nbytes], name + ".padded")
    return graph.cut(flat, 0, groups, 1, name)


def _shift(graph: Graph, x: str, direction: str, name: str) -> str:
    return graph.add(
        "BitShift", [x, graph.constant("nibble.bits", SHIFT)], name, direction=direction
    )


GATHER_BLOCKS, FLOAT_PRODUCT = "GatherBlockQuantized", "FusedMatMul"
HALF, WIDE = ".fp16", ".fp32"  # suffixes of the names of cast values
TURNED = ".turned"  # of matrices


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Return why a model cannot have these variants; empty if it can."""
    if reason := obstacle_of_layers(config):
        return reason
    if layout is not None and not fits(layout):
        kind = "experts" if config.stem_ffn == "hash-moe" else "rows"
        return f"{kind} of {layout.parts} in groups of {layout.group_size} have no device layout"
    block, groups = _embedding_blocks(config, format)
    if groups % 2 and block == MIN_BLOCK:
        return (
            f"a row of the 4-bit embedding has {groups} blocks of {block}, and some accelerators "
            "refuse an odd number; use a smaller --block-size, or --bits embedding=8"
        )
    return ""


def obstacle_of_layers(config: ModelConfig) -> str:
    """Return why only the CPU can run a model's layers; empty if accelerators can, too."""
    if config.row_window:
        return "means of the rows of several tokens run on the CPU only"
    if config.ngram_order:
        return "rows of n-grams run on the CPU only"
    return (
        "matrices whose inputs round to the steps of a training run on the CPU only"
        if config.ranges
        else ""
    )


def _embedding_blocks(config: ModelConfig, format: BackboneFormat) -> tuple[int, int]:
    """Return size and number of the blocks in a row of a 4-bit embedding; else 0, 0."""
    block = fitting_block(config.dim, format.block_size)
    return (block, config.dim // block) if format.bits("embedding") == 4 else (0, 0)


def derive(graph: Graph, layout: RecordLayout | None, activations: Activations) -> Graph:
    """Change a graph that decodes into its variant, in place; requires no `obstacle`."""
    rows = DeviceRows(layout, activations) if layout is not None else None
    for node in graph.nodes:  # otherwise providers that know the level round activations to int8
        node.attributes.pop("accuracy_level", None)
    before = _even_blocks(graph, rows) + _turned_matrices(graph)
    if activations == "fp16":
        before = _halve(graph, before)
    graph.nodes = before + graph.nodes
    return graph


def _gathers_rows(node: Node) -> bool:
    return node.inputs[0].startswith(io.ROW_CODES)


def _even_blocks(graph: Graph, rows: DeviceRows | None) -> list[Node]:
    """Adapt blocks of rows to a device, and give rows of the embedding an even number of blocks."""
    before: list[Node] = []
    for node in graph.nodes:
        if node.op != GATHER_BLOCKS:
            continue
        if _gathers_rows(node) and rows is not None:
            node.attributes["block_size"] = rows.group_size
        elif node.attributes["bits"] == 4 and graph.tensors[node.inputs[2]].dims[1] % 2:
            before += _doubled(graph, node)
    return before


def _doubled(graph: Graph, node: Node) -> list[Node]:
    """Return nodes that repeat each scale of a matrix and its zero point."""
    scales, points = node.inputs[2:]
    lines, groups = graph.tensors[scales].dims
    node.attributes["block_size"] = node.size("block_size") // 2
    made = Graph(tensors=graph.tensors)
    apart = made.add("Unsqueeze", [scales, made.sizes([2])], f"{scales}.apart")
    twice = made.add("Concat", [apart, apart], f"{scales}.twice", axis=2)
    node.inputs[2] = made.reshape(twice, [lines, 2 * groups], f"{scales}.flat")
    # A byte holds two zero points, so there is one for each of the original groups.
    low, high = (doubled(made, half) for half in halves(made, points))
    node.inputs[3] = joined(made, low, high, (lines, groups), f"{points}.twice")
    return made.nodes


def _turned_matrices(graph: Graph) -> list[Node]:
    """Replace FusedMatMul, which not every provider has; return the Transposes to run before."""
    before = dict[str, Node]()
    for node in graph.nodes:
        if node.op == FLOAT_PRODUCT:
            x, matrix = node.inputs
            before[matrix] = Node("Transpose", [matrix], [matrix + TURNED])
            node.op, node.domain, node.attributes = "MatMul", "", {}
            node.inputs = [x, matrix + TURNED]
    return list(before.values())


def _halve(graph: Graph, before: list[Node]) -> list[Node]:
    """Change activations to float16; return the nodes to run first: casts, then `before`.

    Float matrices belong to a backbone that shall be exact. They and their products stay float32,
    because some accelerators accumulate float16 products in float16.
    """
    turned = {node.inputs[0] for node in before if node.op == "Transpose"}
    tensors = [n for n, tensor in graph.tensors.items() if tensor.type == ElementType.FLOAT]
    floats = [name for name in tensors if name not in turned]
    rows = {node.inputs[0] for node in graph.nodes if _gathers_rows(node)}
    casts = [_cast(name, name + HALF, ElementType.FLOAT16) for name in floats]
    _rename_inputs([*before, *graph.nodes], {name: name + HALF for name in floats})
    nodes = _rows_halved(graph)
    for values in (graph.inputs, graph.outputs):
        for name, value in values.items():
            if value.type == ElementType.FLOAT and name not in {io.LOGITS, *rows}:
                values[name] = replace(value, type=ElementType.FLOAT16)
    if nodes[-1].outputs[0] == io.LOGITS and nodes[-1].inputs[0].endswith(WIDE):
        nodes.pop()  # the cast to float16: logits are wanted as float32, which the product gives
        nodes[-1].outputs[0] = io.LOGITS
    elif nodes[-1].outputs[0] == io.LOGITS:
        nodes[-1].outputs[0] = io.LOGITS + HALF
        nodes.append(_cast(io.LOGITS + HALF, io.LOGITS, ElementType.FLOAT))
    graph.nodes = nodes
    return casts + before


def _rows_halved(graph: Graph) -> list[Node]:
    """Return the nodes, with rows stored as floats cast to float16 after they are gathered."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "Cast":  # not needed: it widens rows that are stored as float16
            nodes[-1].outputs[0] = node.outputs[0]
            continue
        if node.inputs[-1].endswith(TURNED):
            nodes += _in_float32(node)
            continue
        nodes.append(node)
        if _gathers_rows(node) and graph.inputs[node.inputs[0]].type == ElementType.FLOAT:
            name = node.outputs[0]
            node.outputs[0] = name + ".stored"
            nodes.append(_cast(node.outputs[0], name, ElementType.FLOAT16))
    return nodes


def _in_float32(node: Node) -> list[Node]:
    """Wrap a product of float16 activations in casts, so that it is computed in float32."""
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
