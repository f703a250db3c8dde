"""Graphs in standard ONNX operators, which every execution provider can implement.

Each decoding graph is rewritten node by node. Weights stay in the same file, where quantized codes are
read as UINT4 or UINT8 [N, K]. Nodes compute zero points that the file pads or omits; onnxruntime runs
such nodes once, while it loads the graph.

| operator of onnxruntime | becomes |
|---|---|
| MatMulNBits | DequantizeLinear, Transpose, MatMul; some providers keep weights quantized then |
| FusedMatMul | Transpose, MatMul |
| GatherBlockQuantized | Gather of codes, scales and zero points, then arithmetic |
| GroupQueryAttention | attention.py |
| norms | sums and products |
| QuickGelu | Sigmoid, Mul |
| FastGelu | Gelu |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.device import PLACES, mask_name
from stem_edge.graph.device.attention import attention
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import ElementType, Graph, Node
from stem_edge.graph.parts.heads import NOTHING
from stem_edge.tables.rows import RecordLayout

CODES = {4: ElementType.UINT4, 8: ElementType.UINT8}
LOW, SHIFT = np.array(15, np.uint8), np.array(4, np.uint8)


def obstacle(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> str:
    """Return why only the CPU can run a model; "" if accelerators can run it, too."""
    if config.row_window:
        return "means of the rows of several tokens run on the CPU only"
    if config.ngram_order:
        return "rows of n-grams run on the CPU only"
    if config.ranges:
        return "matrices whose inputs round to the steps of a training run on the CPU only"
    if "int2" in format.types():
        return "matrices of 2 bits run on the CPU only"
    if layout is not None and (len(layout.parts) != 1 or len(layout.parts[0]) != 1):
        return "experts run on the CPU only"
    return ""


def graphs(
    config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> dict[str, Graph]:
    """Return name -> decoding graph for accelerators. Call only if `obstacle` found none ("")."""
    made = dict[str, Graph]()
    for name, graph in decoding(config, layout, format).graphs.items():
        lowering = _Lowering(graph, config, layout)
        for node in graph.nodes:
            lowering.lower(node)
        _declare(name, graph, lowering.made, config, layout)
        made[name] = lowering.made
    return made


def _declare(
    name: str, source: Graph, graph: Graph, config: ModelConfig, layout: RecordLayout | None
) -> None:
    """Declare the inputs and outputs of `graph`, the accelerator form of the graph `source`."""
    kept = (io.TOKEN_IDS, io.HIDDEN, io.EMBEDDED, io.WANTED)
    graph.inputs = {n: source.inputs[n] for n in kept if n in source.inputs}
    results = (io.NEW + io.HIDDEN, io.LOGITS)
    graph.outputs = {n: source.outputs[n] for n in results if n in source.outputs}
    tokens = "n" if name == io.REST else "T"
    for number in io.layer_graphs(config).get(name, ()):
        layer = config.layer(number)
        width = io.head_width(layer)
        for table in io.rope_names(config, layer):
            graph.input(table, np.float32, [tokens, width // 2])
        graph.input(mask_name(layer.window), np.float32, [tokens, "P"])
        for cache in (f"{io.KEYS}{layer.kv_layer}", f"{io.VALUES}{layer.kv_layer}"):
            shape: list[int | str] = ["P", layer.n_kv_heads * width]
            graph.input(cache, np.float32, shape)
            if layer.kv_layer == number:
                graph.input(PLACES, np.int64, ["T", 1])
                graph.output(io.NEW + cache, np.float32, shape)
        if layout is not None and number in config.stem_layers:
            graph.input(io.SLOT_IDS, np.int64, [1, tokens])
            graph.input(io.row_codes(number), layout.codes_dtype, ["slots", layout.codes_width()])
            if layout.quantized:
                shape = ["slots", layout.part_groups()]
                graph.input(io.row_scales(number), np.float32, shape)


class _Lowering:
    """Rewrites the nodes of one graph, in their order, into standard operators."""

    def __init__(self, graph: Graph, config: ModelConfig, layout: RecordLayout | None) -> None:
        self._config, self._layout, self._stored = config, layout, graph.tensors
        self._names: dict[str, str] = {}  # omitted value -> the value that replaces it
        self.made = Graph()
        self._forms: Mapping[str, Callable[[Node], None]] = {
            "FusedMatMul": self._float_product,
            "FastGelu": self._gelu,
            "Gather": self._gather,
            "GatherBlockQuantized": self._gather_blocks,
            "GroupQueryAttention": lambda node: attention(self.made, node, config),
            "MatMulNBits": self._block_product,
            "QuickGelu": self._silu,
            "SimplifiedLayerNormalization": self._norm,
            "SkipSimplifiedLayerNormalization": self._norm,
        }

    def lower(self, node: Node) -> None:
        if node.outputs[0].startswith(NOTHING):
            return  # empty keys and values, which only GroupQueryAttention reads
        renamed = replace(node, inputs=[self._names.get(name, name) for name in node.inputs])
        self._forms.get(node.op, self._same)(renamed)

    def _same(self, node: Node) -> None:
        for name in node.inputs:
            self._keep(name)
        self.made.nodes.append(node)

    def _float_product(self, node: Node) -> None:
        x, matrix = node.inputs
        turned = matrix + ".turned"
        if matrix not in self.made.tensors:  # else another product has added the Transpose
            self.made.add("Transpose", [self._keep(matrix)], turned, perm=(1, 0))
        self.made.add("MatMul", [x, turned], node.outputs[0])

    def _gather(self, node: Node) -> None:
        if node.inputs[0] in (io.SLOT_IDS, io.POSITIONS):
            # The input has only the wanted tokens already, because WebGPU cannot gather int64.
            self._names[node.outputs[0]] = node.inputs[0]
        else:
            self._same(node)

    def _gather_blocks(self, node: Node) -> None:
        codes, ids, scales, points = node.inputs
        nodes, name, bits = self.made, node.outputs[0], node.attributes["bits"]
        if codes in self._stored:
            width, groups = self._config.dim, self._stored[scales].dims[1]
            values = self._numbers(codes, ids, bits, self._stored[codes].dims[1])
            zeros = self._numbers(points, ids, bits, self._stored[points].dims[1])
            if groups * bits % 8:
                zeros = nodes.cut(zeros, 0, groups, 1, zeros + ".cut")
            zeros = nodes.reshape(zeros, [0, 0, groups, 1], zeros + ".apart")
        else:
            layout = cast(RecordLayout, self._layout)  # a model with rows has one
            width, groups = layout.row_width, layout.part_groups()
            values = self._numbers(codes, ids, bits, layout.codes_width())
            zeros = nodes.float(float(1 << (bits - 1)))
        values = nodes.reshape(values, [0, 0, groups, width // groups], name + ".blocks")
        factors = nodes.add("Gather", [self._keep(scales), ids], f"{scales}.of.{ids}")
        factors = nodes.reshape(factors, [0, 0, groups, 1], factors + ".apart")
        values = nodes.add("Sub", [values, zeros], name + ".moved")
        values = nodes.add("Mul", [values, factors], name + ".scaled")
        nodes.reshape(values, [0, 0, width], name)

    def _numbers(self, packed: str, ids: str, bits: int, nbytes: int) -> str:
        """Emit rows `ids` of `packed` codes [_, nbytes], unpacked to float32 [1, T, values]."""
        nodes, at = self.made, f"{packed}.of.{ids}"
        lines = nodes.add("Gather", [self._keep(packed), ids], at + ".gathered")
        lines = nodes.add("Cast", [lines], at + ".floats", to=int(ElementType.FLOAT))
        if bits == 8:
            return lines
        part = nodes.add("Mul", [lines, nodes.float(1 / 16)], at + ".part")
        high = nodes.add("Floor", [part], at + ".high")
        shifted = nodes.add("Mul", [high, nodes.float(16)], at + ".shifted")
        low = nodes.add("Sub", [lines, shifted], at + ".low")
        pair = [nodes.reshape(half, [0, 0, nbytes, 1], half + ".apart") for half in (low, high)]
        pairs = nodes.add("Concat", pair, at + ".pairs", axis=-1)
        return nodes.reshape(pairs, [0, 0, 2 * nbytes], at + ".numbers")

    def _block_product(self, node: Node) -> None:
        x, codes, scales, *points = node.inputs
        rows, width, bits, block = (node.attributes[n] for n in ("N", "K", "bits", "block_size"))
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
        """Emit 4-bit zero points, unpacked to [rows, groups], without the half byte that pads a row."""
        nodes, nbytes = self.made, -(-groups // 2)
        low = nodes.add("BitwiseAnd", [points, nodes.constant("nibble", LOW)], points + ".low")
        bits = nodes.constant("nibble.bits", SHIFT)
        high = nodes.add("BitShift", [points, bits], points + ".high", direction="RIGHT")
        apart = [nodes.reshape(half, [rows, nbytes, 1], half + ".apart") for half in (low, high)]
        pairs = nodes.add("Concat", apart, points + ".pairs", axis=-1)
        flat = nodes.reshape(pairs, [rows, 2 * nbytes], points + ".flat")
        values = nodes.cut(flat, 0, groups, 1, points + ".values")
        return nodes.add("Cast", [values], points + ".4", to=int(ElementType.UINT4))

    def _middle(self, scales: str, shape: tuple[int, int], bits: int) -> str:
        """Emit zero points of symmetric blocks: the middle code, 8 of 4 bits or 128 of 8 bits."""
        nodes, name = self.made, scales + ".middle"
        middle = np.array([1 << (bits - 1)], np.uint8)
        zeros = nodes.fill(nodes.sizes(shape), name, middle)
        if bits == 8:
            return zeros
        # Filled as uint8 and cast, because ConstantOfShape cannot fill tensors of 4 bits.
        return nodes.add("Cast", [zeros], scales + ".middle.4", to=int(ElementType.UINT4))

    def _gelu(self, node: Node) -> None:
        self.made.add("Gelu", node.inputs, node.outputs[0], approximate="tanh")

    def _silu(self, node: Node) -> None:
        name = node.outputs[0]
        part = self.made.add("Sigmoid", [node.inputs[0]], name + ".part")
        self.made.add("Mul", [node.inputs[0], part], name)

    def _norm(self, node: Node) -> None:
        x, *skip, weight = node.inputs
        if skip:
            x = self.made.add("Add", [x, *skip], node.outputs[3])
        plain_norm(self.made, x, self._keep(weight), node.outputs[0], node.attributes["epsilon"])

    def _keep(
        self, name: str, kind: ElementType | None = None, dims: tuple[int, ...] | None = None
    ) -> str:
        """Copy a weight into the new graph, with a new type or shape if given; return its name."""
        if name in self._stored and name not in self.made.tensors:
            stored = self._stored[name]
            self.made.tensors[name] = replace(
                stored, type=kind or stored.type, dims=stored.dims if dims is None else dims
            )
        return name


def plain_norm(graph: Graph, x: str, weight: str, result: str, eps: float) -> str:
    """Emit an RMS norm in standard operators, as a pattern that onnxruntime fuses to one node."""
    squares = graph.add("Pow", [x, graph.float(2.0)], result + ".squares")
    mean = graph.add("ReduceMean", [squares, graph.sizes([-1])], result + ".mean", keepdims=1)
    moved = graph.add("Add", [mean, graph.float(eps)], result + ".moved")
    size = graph.add("Sqrt", [moved], result + ".size")
    normed = graph.add("Div", [x, size], result + ".normed")
    return graph.add("Mul", [normed, weight], result)
