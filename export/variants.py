"""Graphs for accelerators, derived from the graphs that decode: the same nodes over the same weights.

Nothing is read of the weights and nothing of them is copied. What must become another type or shape
does so in a node, which onnxruntime computes once, when it loads: float32 weights, norms and scales
are cast, and scales that are odd in number are given twice, for blocks of half the size
(stem_edge.device_rows says why). stem_edge.graph_io has what goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stem_edge import graph_io as io
from stem_edge.bundle import BackboneFormat
from stem_edge.config import ModelConfig
from stem_edge.device_rows import Activations, DeviceRows, fits
from stem_edge.quantize import MIN_BLOCK, fitting_block
from stem_edge.rows import RecordLayout

GATHER_BLOCKS, PRODUCT, FLOAT_PRODUCT = "GatherBlockQuantized", "MatMulNBits", "FusedMatMul"
HALF, WIDE = ".fp16", ".fp32"  # end the names of what was cast
SYMMETRIC = 0x88  # two zero points of 4 bits


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Why a model has no graphs that keep everything on a device; empty if it can have them."""
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


def _embedding_blocks(config: ModelConfig, format: BackboneFormat) -> tuple[int, int]:
    """Size and number of blocks of a 4-bit embedding; of another 0."""
    block = fitting_block(config.dim, format.block_size)
    return (block, config.dim // block) if format.bits("embedding") == 4 else (0, 0)


def derive(
    graph: str, model: onnx.ModelProto, layout: RecordLayout | None, activations: Activations
) -> onnx.ModelProto:
    """The variant of a decode graph, of a model without `obstacle`; `model` stays as it is."""
    derived = onnx.ModelProto()
    derived.CopyFrom(model)
    body = derived.graph
    rows = DeviceRows(layout, activations) if layout is not None else None
    _exact_products(body)
    before = _even_blocks(body, rows) + _turned_matrices(body)
    if graph == io.HEAD:
        before += _wanted(body)
    if activations == "fp16":
        before = _halve(body, before)
    nodes = [*before, *body.node]
    del body.node[:]
    body.node.extend(nodes)
    return derived


def _even_blocks(body: onnx.GraphProto, rows: DeviceRows | None) -> list[onnx.NodeProto]:
    """Blocks of rows as a device has them, and an even number of those of the embedding."""
    before: list[onnx.NodeProto] = []
    dims = {tensor.name: tuple(tensor.dims) for tensor in body.initializer}
    for node in body.node:
        if node.op_type != GATHER_BLOCKS:
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.input[1] == io.SLOT_IDS and rows is not None:
            attributes["block_size"].i = rows.group_size
        elif attributes["bits"].i == 4 and dims[node.input[2]][1] % 2:
            attributes["block_size"].i //= 2
            before += _doubled(body, node, dims[node.input[2]])
    return before


def _doubled(
    body: onnx.GraphProto, node: onnx.NodeProto, shape: tuple[int, ...]
) -> list[onnx.NodeProto]:
    """Nodes that give each scale of a matrix twice, and its zero points, all alike."""
    scales, points, (lines, groups) = node.input[2], node.input[3], shape
    kept = [tensor for tensor in body.initializer if tensor.name != points]
    del body.initializer[:]
    body.initializer.extend(kept)
    axis, size = (f"{scales}.{name}" for name in ("axis", "size"))
    wanted, apart, twice, flat = (f"{scales}.{n}" for n in ("shape", "apart", "twice", "flat"))
    _constant(body, axis, [2])
    _constant(body, wanted, [lines, 2 * groups])
    _constant(body, size, [lines, groups])  # bytes of as many pairs
    node.input[2], node.input[3] = flat, points
    filling = helper.make_tensor("value", TensorProto.UINT8, [1], [SYMMETRIC])
    return [
        _node("Unsqueeze", [scales, axis], apart),
        _node("Concat", [apart, apart], twice, axis=2),
        _node("Reshape", [twice, wanted], flat),
        _node("ConstantOfShape", [size], points, value=filling),
    ]


def _exact_products(body: onnx.GraphProto) -> None:
    """Activations as they are: providers that know the level would round them to int8."""
    for node in body.node:
        kept = [one for one in node.attribute if one.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)


def _turned_matrices(body: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Products with float matrices as every provider has them: with the matrix turned before."""
    before = []
    for node in body.node:
        if node.op_type == FLOAT_PRODUCT:
            turned = node.input[1] + ".turned"
            before.append(_node("Transpose", [node.input[1]], turned))
            node.CopyFrom(_node("MatMul", [node.input[0], turned], node.output[0]))
    return before


def _wanted(body: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The head of some places in a step alone."""
    chosen = f"{io.WANTED}.{io.HIDDEN}"
    _rename_inputs(body.node, {io.HIDDEN: chosen})
    body.input.append(helper.make_tensor_value_info(io.WANTED, TensorProto.INT64, ["n"]))
    body.output[0].type.tensor_type.shape.dim[1].dim_param = "n"
    return [_node("Gather", [io.HIDDEN, io.WANTED], chosen, axis=1)]


def _halve(body: onnx.GraphProto, before: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Activations in float16. Returns the nodes that come first: those before, and casts.

    Matrices of floats, of a backbone that is to be exact, stay float32, and so do their products:
    some accelerators sum up float16 in float16.
    """
    turned = {node.input[0] for node in before if node.op_type == "Transpose"}
    tensors = [t.name for t in body.initializer if t.data_type == TensorProto.FLOAT]
    floats = [name for name in tensors if name not in turned]
    rows = {node.input[0] for node in body.node if io.SLOT_IDS in node.input}
    casts = [_cast(name, name + HALF, TensorProto.FLOAT16) for name in floats]
    _rename_inputs([*before, *body.node], {name: name + HALF for name in floats})
    nodes = _rows_halved(body)
    for value in (*body.input, *body.output):
        kind = value.type.tensor_type
        if kind.elem_type == TensorProto.FLOAT and value.name not in {io.LOGITS, *rows}:
            kind.elem_type = TensorProto.FLOAT16
    if nodes[-1].output[0] == io.LOGITS and nodes[-1].input[0].endswith(WIDE):
        nodes.pop()  # it is float32 as it comes
        nodes[-1].output[0] = nodes[-1].name = io.LOGITS
    elif nodes[-1].output[0] == io.LOGITS:
        nodes[-1].output[0] = nodes[-1].name = io.LOGITS + HALF
        nodes.append(_cast(io.LOGITS + HALF, io.LOGITS, TensorProto.FLOAT))
    del body.node[:]
    body.node.extend(nodes)
    return casts + before


def _rows_halved(body: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes, with rows that are stored as floats in float16 once they are gathered."""
    types = {value.name: value.type.tensor_type.elem_type for value in body.input}
    nodes: list[onnx.NodeProto] = []
    for node in body.node:
        if node.op_type == "Cast":  # of rows that are float16 already
            nodes[-1].output[0] = nodes[-1].name = node.output[0]
            continue
        if node.op_type == "MatMul":
            nodes += _in_float32(node)
            continue
        nodes.append(node)
        if node.op_type == "Gather" and types.get(node.input[0]) == TensorProto.FLOAT:
            name = node.output[0]
            node.output[0] = node.name = name + ".stored"
            nodes.append(_cast(node.output[0], name, TensorProto.FLOAT16))
    return nodes


def _in_float32(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """A product of activations in float16, computed in float32."""
    wide, name = node.output[0] + WIDE, node.output[0]
    first = _cast(node.input[0], wide + ".input", TensorProto.FLOAT)
    node.input[0] = first.output[0]
    node.output[0] = node.name = wide
    return [first, node, _cast(wide, name, TensorProto.FLOAT16)]


def _rename_inputs(nodes: Iterable[onnx.NodeProto], names: dict[str, str]) -> None:
    for node in nodes:
        for at, name in enumerate(node.input):
            node.input[at] = names.get(name, name)


def _constant(body: onnx.GraphProto, name: str, values: Sequence[int]) -> None:
    body.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))


def _cast(source: str, name: str, to: int) -> onnx.NodeProto:
    return _node("Cast", [source], name, to=to)


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=output, **attributes)
