"""Graphs with operators of ONNX alone, for providers that lack those that onnxruntime adds to them.

A finished graph that decodes is rewritten node by node, over the same weights at the same places of
the same file: its codes are read as UINT4 or UINT8 [N, K]. Zero points that are not stored are made
by nodes that onnxruntime computes once, when it loads. stem_edge.graph_io says what goes in and out.

| of onnxruntime | becomes |
|---|---|
| MatMulNBits | DequantizeLinear, Transpose, MatMul: providers that can keep the codes in memory |
| FusedMatMul | Transpose, MatMul |
| GatherBlockQuantized of the embedding | rows of codes, scales and zero points, and arithmetic on them |
| GatherBlockQuantized or Gather of rows | an input |
| GroupQueryAttention | export.portable_attention |
| norms | their sums and products |
| QuickGelu | Sigmoid, Mul |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from stem_edge import graph_io as io
from stem_edge.bundle import MATRIX_KINDS, BackboneFormat, MatrixKind
from stem_edge.config import ModelConfig
from stem_edge.export.graph import ELEMENT_TYPES, IR_VERSION, OPSET
from stem_edge.export.portable_attention import attention
from stem_edge.export.portable_nodes import Attributes, Nodes
from stem_edge.footprint import kinds_of
from stem_edge.graph_io import Values
from stem_edge.portable_io import portable_inputs, portable_outputs, row_name
from stem_edge.quantize import fitting_block
from stem_edge.rows import RecordLayout

CODES = {4: TensorProto.UINT4, 8: TensorProto.UINT8}


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Why a model has no portable graphs; empty if it can have them."""
    if layout is not None and len(layout.parts) != 1:
        return "experts cannot run with ONNX's own operators"
    if not format.asymmetric:
        return ""
    for kind, width in _widths(config).items():
        groups = width // (fitting_block(width, format.block_size) or width)
        if kind != "embedding" and format.bits(kind) == 4 and groups % 2:
            return (
                f"matrices of the kind {kind} have {groups} zero points of 4 bits in a row, an odd "
                f"number of which ONNX cannot read; a smaller --block-size or --bits {kind}=8 helps"
            )
    return ""


def _widths(config: ModelConfig) -> dict[MatrixKind, int]:
    """Inputs of the matrices of each kind that a model has."""
    special: dict[MatrixKind, int] = {
        "wo": config.n_heads * io.head_width(config),
        "down": config.d_ff,
        "project": config.row_rank,
    }
    present = kinds_of(config)
    return {kind: special.get(kind, config.dim) for kind in MATRIX_KINDS if kind in present}


def lower(
    graph: str, model: onnx.ModelProto, config: ModelConfig, layout: RecordLayout | None
) -> onnx.ModelProto:
    """The portable form of a decode graph, of a model without `obstacle`; `model` stays as it is."""
    lowering = _Lowering(graph, model, config)
    for node in model.graph.node:
        lowering.lower(node)
    return _assemble(
        lowering.nodes,
        portable_inputs(graph, config, layout),
        portable_outputs(graph, config),
    )


def _assemble(nodes: Nodes, inputs: Values, outputs: Values) -> onnx.ModelProto:
    declared = [
        [
            helper.make_tensor_value_info(name, ELEMENT_TYPES[np.dtype(value.type)], value.shape)
            for name, value in values.items()
        ]
        for values in (inputs, outputs)
    ]
    taken, given = declared
    body = helper.make_graph(nodes.made, "backbone", taken, given, [*nodes.tensors.values()])
    return helper.make_model(
        body,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="stem-edge",
    )


class _Lowering:
    """Rewrites the nodes of one graph, in their order."""

    def __init__(self, graph: str, model: onnx.ModelProto, config: ModelConfig) -> None:
        self._config = config
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._names: dict[str, str] = {}  # of a value -> what it is now
        self.nodes = Nodes()
        self._forms: Mapping[str, Callable[[onnx.NodeProto, Attributes], None]] = {
            "Cast": self._cast,
            "FusedMatMul": self._float_product,
            "Gather": self._gather,
            "GatherBlockQuantized": self._gather_blocks,
            "GroupQueryAttention": self._attention,
            "MatMulNBits": self._block_product,
            "QuickGelu": self._silu,
            "SimplifiedLayerNormalization": self._norm,
            "SkipSimplifiedLayerNormalization": self._skip_norm,
        }
        if graph == io.HEAD:
            self._names[io.HIDDEN] = self.nodes.add(
                "Gather", [io.HIDDEN, io.WANTED], "wanted.hidden", axis=1
            )

    def lower(self, node: onnx.NodeProto) -> None:
        """Add what does the same as a node."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        renamed = onnx.NodeProto()
        renamed.CopyFrom(node)
        for at, name in enumerate(node.input):
            renamed.input[at] = self._names.get(name, name)
        self._forms.get(node.op_type, self._same)(renamed, attributes)

    def _same(self, node: onnx.NodeProto, _: Attributes) -> None:
        for name in node.input:
            self._keep(name)
        self.nodes.made.append(node)

    def _cast(self, node: onnx.NodeProto, _: Attributes) -> None:
        self._names[node.output[0]] = node.input[0]  # of rows, which come in as float32

    def _float_product(self, node: onnx.NodeProto, _: Attributes) -> None:
        x, matrix = node.input
        turned = self.nodes.add("Transpose", [self._keep(matrix)], matrix + ".turned", perm=[1, 0])
        self.nodes.add("MatMul", [x, turned], node.output[0])

    def _gather(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        if not self._row(node, node.input[0]):
            self._same(node, attributes)

    def _row(self, node: onnx.NodeProto, codes: str) -> bool:
        """Whether what a node gathers are rows, which then come in."""
        layers = {io.row_codes(layer): layer for layer in self._config.stem_layers}
        if codes in layers:
            self._names[node.output[0]] = row_name(layers[codes])
        return codes in layers

    def _gather_blocks(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        codes, ids, scales, points = node.input
        if self._row(node, codes):
            return
        nodes, name, bits = self.nodes, node.output[0], attributes["bits"]
        width, groups = self._config.dim, self._stored[scales].dims[1]
        values = self._numbers(codes, ids, bits)
        values = nodes.reshape(values, [0, 0, groups, width // groups], name + ".blocks")
        zeros = self._numbers(points, ids, bits)
        if groups * bits % 8:
            zeros = nodes.cut(zeros, 0, groups, 1, zeros + ".cut")
        zeros = nodes.reshape(zeros, [0, 0, groups, 1], zeros + ".apart")
        factors = nodes.add("Gather", [self._keep(scales), ids], scales + ".gathered")
        factors = nodes.reshape(factors, [0, 0, groups, 1], factors + ".apart")
        values = nodes.add("Sub", [values, zeros], name + ".moved")
        values = nodes.add("Mul", [values, factors], name + ".scaled")
        nodes.reshape(values, [0, 0, width], name)

    def _numbers(self, packed: str, ids: str, bits: int) -> str:
        """Lines of a packed matrix, [1, T, values] as floats, which every provider has kernels for."""
        nodes = self.nodes
        lines = nodes.add("Gather", [self._keep(packed), ids], packed + ".gathered")
        lines = nodes.add("Cast", [lines], packed + ".floats", to=TensorProto.FLOAT)
        if bits == 8:
            return lines
        nbytes = self._stored[packed].dims[1]
        part = nodes.add("Mul", [lines, nodes.float(1 / 16)], packed + ".part")
        high = nodes.add("Floor", [part], packed + ".high")
        shifted = nodes.add("Mul", [high, nodes.float(16)], packed + ".shifted")
        low = nodes.add("Sub", [lines, shifted], packed + ".low")
        pair = [nodes.reshape(half, [0, 0, nbytes, 1], half + ".apart") for half in (low, high)]
        pairs = nodes.add("Concat", pair, packed + ".pairs", axis=-1)
        return nodes.reshape(pairs, [0, 0, 2 * nbytes], packed + ".numbers")

    def _block_product(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        x, codes, scales, *points = node.input
        rows, width, bits, block = (attributes[n] for n in ("N", "K", "bits", "block_size"))
        groups, nodes = width // block, self.nodes
        self._keep(codes, CODES[bits], (rows, width))
        self._keep(scales, TensorProto.FLOAT, (rows, groups))
        if points:
            zeros = self._keep(points[0], CODES[bits], (rows, groups))
        else:
            zeros = self._middle(scales, (rows, groups), bits)
        weight = nodes.add(
            "DequantizeLinear", [codes, scales, zeros], codes + ".floats", axis=1, block_size=block
        )
        turned = nodes.add("Transpose", [weight], codes + ".turned", perm=[1, 0])
        nodes.add("MatMul", [x, turned], node.output[0])

    def _middle(self, scales: str, shape: tuple[int, int], bits: int) -> str:
        """Zero points of symmetric blocks, as many as there are scales."""
        nodes = self.nodes
        middle = helper.make_tensor("value", TensorProto.UINT8, [1], [1 << (bits - 1)])
        size, name = nodes.sizes(shape), scales + ".middle"
        zeros = nodes.add("ConstantOfShape", [size], name, value=middle)
        if bits == 8:
            return zeros
        # onnxruntime fills no tensor of 4 bits, but casts to one.
        return nodes.add("Cast", [zeros], scales + ".middle.4", to=TensorProto.UINT4)

    def _attention(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        layer = int(node.output[1].removeprefix(io.NEW + io.KEYS))
        attention(self.nodes, node, self._config, layer, attributes["scale"])

    def _silu(self, node: onnx.NodeProto, _: Attributes) -> None:
        name = node.output[0]
        part = self.nodes.add("Sigmoid", [node.input[0]], name + ".part")
        self.nodes.add("Mul", [node.input[0], part], name)

    def _skip_norm(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        x, skip, weight = node.input
        total = self.nodes.add("Add", [x, skip], node.output[3])
        self._rms_norm(total, weight, node.output[0], attributes)

    def _norm(self, node: onnx.NodeProto, attributes: Attributes) -> None:
        self._rms_norm(node.input[0], node.input[1], node.output[0], attributes)

    def _rms_norm(self, x: str, weight: str, name: str, attributes: Attributes) -> None:
        nodes = self.nodes
        squares = nodes.add("Mul", [x, x], name + ".squares")
        mean = nodes.add("ReduceMean", [squares, nodes.sizes([-1])], name + ".mean", keepdims=1)
        moved = nodes.add("Add", [mean, nodes.float(attributes["epsilon"])], name + ".moved")
        size = nodes.add("Sqrt", [moved], name + ".size")
        normed = nodes.add("Div", [x, size], name + ".normed")
        nodes.add("Mul", [normed, self._keep(weight)], name)

    def _keep(self, name: str, kind: int | None = None, dims: Sequence[int] | None = None) -> str:
        """Take a weight over, if this is one, its bytes read as another type and shape."""
        if name in self._stored and name not in self.nodes.tensors:
            tensor = TensorProto()
            tensor.CopyFrom(self._stored[name])
            if kind is not None and dims is not None:
                tensor.data_type = kind
                del tensor.dims[:]
                tensor.dims.extend(dims)
            self.nodes.tensors[name] = tensor
        return name
