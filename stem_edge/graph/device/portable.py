"""Portable variant: graphs in standard ONNX, for providers without onnxruntime's own operators.

A graph that decodes is rewritten node by node over the same weight file, whose codes are read as
UINT4 or UINT8 [N, K]. Zero points that are not stored, or with padding, come from nodes that
onnxruntime computes once, while it loads. stem_edge.graph.names lists inputs and outputs.

| operator of onnxruntime | becomes |
|---|---|
| MatMulNBits | DequantizeLinear, Transpose, MatMul: some providers then keep the codes in memory |
| FusedMatMul | Transpose, MatMul |
| GatherBlockQuantized of the embedding | Gather of codes, scales and zero points, then arithmetic |
| GatherBlockQuantized or Gather of rows | an input |
| GroupQueryAttention | portable_attention |
| norms | their sums and products |
| QuickGelu | Sigmoid, Mul |
| FastGelu | Gelu |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device import adapting
from stem_edge.graph.device.adapting import halves, joined
from stem_edge.graph.device.portable_attention import attention
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import ElementType, Graph, Node
from stem_edge.graph.layer import plain_norm
from stem_edge.tables.rows import RecordLayout

CODES = {4: ElementType.UINT4, 8: ElementType.UINT8}


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Return why a model cannot have portable graphs; empty if it can."""
    if layout is not None and len(layout.parts) != 1:
        return "experts cannot run with ONNX's own operators"
    if format.has("int2"):
        return "matrices of 2 bits run on the CPU only"
    return adapting.obstacle_of_layers(config)


def lower(name: str, graph: Graph, config: ModelConfig, layout: RecordLayout | None) -> Graph:
    """Return the portable form of a graph that decodes; the model must have no `obstacle`."""
    lowering = _Lowering(graph, config)
    for node in graph.nodes:
        lowering.lower(node)
    _declare(name, graph, lowering.made, config, layout)
    return lowering.made


def _declare(
    name: str, source: Graph, graph: Graph, config: ModelConfig, layout: RecordLayout | None
) -> None:
    """Declare inputs and outputs; caches, masks, angles and rows differ from those of the source."""
    kept = (io.TOKEN_IDS, io.HIDDEN, io.EMBEDDED, io.WANTED)
    graph.inputs = {n: source.inputs[n] for n in kept if n in source.inputs}
    results = (io.NEW + io.HIDDEN, io.LOGITS)
    graph.outputs = {n: source.outputs[n] for n in results if n in source.outputs}
    # Columns of masks: the P earlier tokens, then those of the step, if they are not among these.
    tokens, seen = ("n", "P") if name == io.REST else ("T", "P+T")
    for number in io.layer_graphs(config).get(name, ()):
        layer = config.layer(number)
        heads = [layer.n_kv_heads, width := io.head_width(layer)]
        for table in io.rope_names(config, layer):
            graph.input(table, np.float32, [tokens, width // 2])
        graph.input(io.mask_name(layer.window), np.float32, [tokens, seen])
        for cache in (io.KEYS, io.VALUES):
            graph.input(f"{cache}{layer.kv_layer}", np.float32, [1, "P", *heads])
            if layer.kv_layer == number:
                graph.output(f"{io.NEW}{cache}{number}", np.float32, [1, "T", *heads])
        if layout is not None and number in config.stem_layers:
            graph.input(io.row_name(number), np.float32, [1, tokens, layout.row_width])


class _Lowering:
    """Rewriter of the nodes of one graph, in their order."""

    def __init__(self, graph: Graph, config: ModelConfig) -> None:
        self._config, self._stored = config, graph.tensors
        self._names: dict[str, str] = {}  # value that was dropped -> the value that replaces it
        self.made = Graph()
        self._forms: Mapping[str, Callable[[Node], None]] = {
            "Cast": self._cast,
            "FusedMatMul": self._float_product,
            "FastGelu": self._gelu,
            "Gather": self._gather,
            "GatherBlockQuantized": self._gather_blocks,
            "GroupQueryAttention": self._attention,
            "MatMulNBits": self._block_product,
            "QuickGelu": self._silu,
            "SimplifiedLayerNormalization": self._norm,
            "SkipSimplifiedLayerNormalization": self._skip_norm,
        }

    def lower(self, node: Node) -> None:
        """Add nodes of the ONNX standard that are equivalent to a node."""
        renamed = replace(node, inputs=[self._names.get(name, name) for name in node.inputs])
        self._forms.get(node.op, self._same)(renamed)

    def _same(self, node: Node) -> None:
        for name in node.inputs:
            self._keep(name)
        self.made.nodes.append(node)

    def _cast(self, node: Node) -> None:
        self._names[node.outputs[0]] = node.inputs[0]  # drop it, because rows come in as float32

    def _float_product(self, node: Node) -> None:
        x, matrix = node.inputs
        turned = matrix + ".turned"
        if matrix not in self.made.tensors:  # otherwise done, for another product with it
            self.made.add("Transpose", [self._keep(matrix)], turned, perm=(1, 0))
        self.made.add("MatMul", [x, turned], node.outputs[0])

    def _gather(self, node: Node) -> None:
        if not self._row(node, node.inputs[0]):
            self._same(node)

    def _row(self, node: Node, codes: str) -> bool:
        """Replace a node by an input if it gathers rows; return whether it does."""
        layers = {io.row_codes(layer): layer for layer in self._config.stem_layers}
        if codes in layers:
            self._names[node.outputs[0]] = io.row_name(layers[codes])
        return codes in layers

    def _gather_blocks(self, node: Node) -> None:
        codes, ids, scales, points = node.inputs
        if self._row(node, codes):
            return
        nodes, name, bits = self.made, node.outputs[0], node.size("bits")
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
        """Unpack rows as floats [1, T, values], because every provider has kernels for those."""
        nodes = self.made
        lines = nodes.add("Gather", [self._keep(packed), ids], packed + ".gathered")
        lines = nodes.add("Cast", [lines], packed + ".floats", to=int(ElementType.FLOAT))
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

    def _block_product(self, node: Node) -> None:
        x, codes, scales, *points = node.inputs
        rows, width, bits, block = map(node.size, ("N", "K", "bits", "block_size"))
        groups, nodes = width // block, self.made
        self._keep(codes, CODES[bits], (rows, width))
        self._keep(scales, ElementType.FLOAT, (rows, groups))
        if points and groups * bits % 8:
            zeros = self._padded(self._keep(points[0], None, (rows, -(-groups // 2))), rows, groups)
        elif points:
            zeros = self._keep(points[0], CODES[bits], (rows, groups))
        else:
            zeros = self._middle(scales, (rows, groups), bits)
        weight = nodes.add(
            "DequantizeLinear", [codes, scales, zeros], codes + ".floats", axis=1, block_size=block
        )
        turned = nodes.add("Transpose", [weight], codes + ".turned", perm=(1, 0))
        nodes.add("MatMul", [x, turned], node.outputs[0])

    def _padded(self, points: str, rows: int, groups: int) -> str:
        """Emit zero points of 4 bits [rows, groups] of rows that end with half a byte."""
        low, high = halves(self.made, points)
        values = joined(self.made, low, high, (rows, groups), points + ".values")
        return self.made.add("Cast", [values], points + ".4", to=int(ElementType.UINT4))

    def _middle(self, scales: str, shape: tuple[int, int], bits: int) -> str:
        """Emit the zero points of symmetric blocks, in the shape of the scales."""
        nodes, name = self.made, scales + ".middle"
        middle = np.array([1 << (bits - 1)], np.uint8)
        zeros = nodes.fill(nodes.sizes(shape), name, middle)
        if bits == 8:
            return zeros
        # Filled as uint8 and cast, because ConstantOfShape cannot fill tensors of 4 bits.
        return nodes.add("Cast", [zeros], scales + ".middle.4", to=int(ElementType.UINT4))

    def _attention(self, node: Node) -> None:
        attention(self.made, node, self._config)

    def _gelu(self, node: Node) -> None:
        self.made.add("Gelu", node.inputs, node.outputs[0], approximate="tanh")

    def _silu(self, node: Node) -> None:
        name = node.outputs[0]
        part = self.made.add("Sigmoid", [node.inputs[0]], name + ".part")
        self.made.add("Mul", [node.inputs[0], part], name)

    def _skip_norm(self, node: Node) -> None:
        x, skip, weight = node.inputs
        total = self.made.add("Add", [x, skip], node.outputs[3])
        self._rms_norm(total, weight, node)

    def _norm(self, node: Node) -> None:
        self._rms_norm(node.inputs[0], node.inputs[1], node)

    def _rms_norm(self, x: str, weight: str, node: Node) -> None:
        plain_norm(self.made, x, self._keep(weight), node.outputs[0], node.real("epsilon"))

    def _keep(
        self, name: str, kind: ElementType | None = None, dims: tuple[int, ...] | None = None
    ) -> str:
        """Copy the declaration of a weight, reinterpreted if asked; other names pass through."""
        if name in self._stored and name not in self.made.tensors:
            stored = self._stored[name]
            self.made.tensors[name] = replace(
                stored, type=kind or stored.type, dims=stored.dims if dims is None else dims
            )
        return name
