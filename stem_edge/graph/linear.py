"""Matrix products: float32 or quantized in blocks to decode, int8 for prompts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from stem_edge.graph.formats import SMALL_KINDS, BackboneFormat, MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph, GraphError
from stem_edge.graph.weight_plan import Balance, Blocks, Columns, Floats, Piece, Vector, WeightPlan
from stem_edge.numerics.quantize import MIN_BLOCK, fitting_block

# onnxruntime packs a matrix into memory of its own while it loads. A head of 128,256 rows is split
# into pieces of this many values, so that this never takes more than a layer's matrix does.
SPLIT_VALUES = 1 << 24
INT8_MAX = 127


class Products(Protocol):
    """Products of one graph: x [B, T, K] times the transpose of stacked matrices [N, K]."""

    graph: Graph
    plan: WeightPlan

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Return the weight [size] of an RMS norm whose result feeds the product `consumer`."""

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit the product with tensors `parts`, stacked to `shape` [N, K]; return its result."""


class DecodeProducts:
    """Products that decode: each kind of matrix has the type that its BackboneFormat names.

    Quantized matrices are multiplied with activations in blocks of int8.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        self.graph, self.plan, self._format = graph, plan, format

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Return the weight unchanged: nothing is balanced here."""
        return vector(self.graph, self.plan, name, size, (name,))

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit FusedMatMul or MatMulNBits, for a matrix of very many rows several of these."""
        rows, width = shape
        if self._format.bits(kind) == 32:
            weight = matrix(self.graph, self.plan, name + ".weight", shape, parts)
            return self.graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)
        bits, block = self._format.bits(kind), self._block(name, kind, width)
        step = max(1, SPLIT_VALUES // width)
        if len(parts) > 1 or rows <= 2 * step:
            pieces: tuple[Piece, ...] = (self._piece(name, 0, rows, width, bits, block),)
        else:
            starts = enumerate(range(0, rows, step))
            pieces = tuple(
                self._piece(f"{name}.{n}", at, min(at + step, rows), width, bits, block)
                for n, at in starts
            )
        self.plan.items.append(Blocks(name, kind, parts, bits, block, pieces))
        made = [self._emit(x, piece, width, bits, block) for piece in pieces]
        return made[0] if len(made) == 1 else self.graph.add("Concat", made, name, axis=-1)

    def rows(
        self, name: str, kind: MatrixKind, ids: str, result: str, shape: tuple[int, int]
    ) -> str:
        """Emit `result`: the rows of a matrix that have these ids."""
        count, width = shape
        if self._format.bits(kind) == 32:
            weight = matrix(self.graph, self.plan, name, shape, (name,))
            return self.graph.add("Gather", [weight, ids], result)
        bits, block = self._format.bits(kind), self._block(name, kind, width)
        groups, place = width // block, self.plan.place
        # Zero points are explicit because providers' kernels have different defaults.
        piece = Piece(
            0,
            count,
            place(name + ".codes", np.uint8, (count, width * bits // 8)),
            place(name + ".scales", np.float32, (count, groups)),
            points := place(name + ".zero_points", np.uint8, (count, -(-groups * bits // 8))),
        )
        self.plan.items.append(Blocks(name, kind, (name,), bits, block, (piece,)))
        tensors = [self.graph.weight(t) for t in (piece.codes, piece.scales, points)]
        return gather_blocks(self.graph, tensors, ids, result, bits, block)

    def _block(self, name: str, kind: MatrixKind, width: int) -> int:
        block = fitting_block(width, self._format.block_size)
        if not block:
            raise GraphError(
                f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
                f"quantized in blocks; use --bits {kind}=32, or --backbone fp32 --head fp32"
            )
        return block

    def _piece(self, name: str, start: int, stop: int, width: int, bits: int, block: int) -> Piece:
        rows, groups, place, name = stop - start, width // block, self.plan.place, name + ".weight"
        codes = place(name + ".codes", np.uint8, (rows, groups, block * bits // 8))
        scales = place(name + ".scales", np.float32, (rows * groups,))
        points = None
        if self._format.asymmetric:
            nbytes = rows * -(-groups * bits // 8)
            points = place(name + ".zero_points", np.uint8, (nbytes,))
        return Piece(start, stop, codes, scales, points)

    def _emit(self, x: str, piece: Piece, width: int, bits: int, block: int) -> str:
        """Emit the product with one piece; its name is that of its codes."""
        tensors = [piece.codes, piece.scales, *([piece.points] if piece.points else [])]
        return self.graph.node(
            "MatMulNBits",
            [x, *(self.graph.weight(tensor) for tensor in tensors)],
            [piece.codes.name.removesuffix(".weight.codes")],
            CONTRIB,
            K=width,
            N=piece.stop - piece.start,
            bits=bits,
            block_size=block,
            accuracy_level=4,
        )


class PromptProducts:
    """Products for prompts: int8 matrices, a scale per output and one per token of activations.

    Products this coarse are the fastest for many tokens, and the least exact if some input channels
    are far larger than others. Channels are therefore balanced against the columns of the matrix
    (SmoothQuant, arXiv 2211.10438): x / s times W * s. The division is folded into the preceding
    norm; products without one, if named in `balanced`, get a multiplication of their own.

    Small matrices are multiplied as in decoding, because no norm precedes them that could take a
    balance.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        self.graph, self.plan = graph, plan
        self._as_decoding = DecodeProducts(graph, plan, format)
        self._balanced = frozenset(format.balanced)  # a set, because a manifest may name very many
        self._normed: set[str] = set()  # consumers whose balance divides a norm
        self._quantized: dict[str, tuple[str, str]] = {}  # x -> its codes and scales

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Return the weight divided by the consumer's balance."""
        self._normed.add(consumer)
        return vector(self.graph, self.plan, name, size, (name,), divided_by=consumer)

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit an integer product and its scaling; x is quantized once for all its consumers."""
        if kind in SMALL_KINDS:
            return self._as_decoding.product(name, kind, x, parts, shape)
        (rows, width), graph = shape, self.graph
        # gate and up have the same input, so they must share a balance.
        consumer = name.replace(".up", ".gate")
        if consumer not in self._normed:
            consumer = name if name in self._balanced else ""
            if consumer:
                tensor = self.plan.place(name + ".balance", np.float32, (width,))
                self.plan.items.append(Balance(tensor, consumer))
                x = graph.add("Mul", [x, graph.weight(tensor)], name + ".balanced")
        codes, scale = self._quantize(x)
        matrix = self.plan.place(name + ".codes", np.int8, (width, rows))
        scales = self.plan.place(name + ".scales", np.float32, (rows,))
        self.plan.items.append(Columns(name, parts, consumer, matrix, scales))
        middle = graph.constant("middle", np.array(128, np.uint8))
        raw = graph.node(
            "MatMulIntegerToFloat",
            [codes, graph.weight(matrix), graph.float(1.0), graph.weight(scales), middle],
            [name + ".raw"],
            CONTRIB,
        )
        return graph.add("Mul", [raw, scale], name)

    def _quantize(self, x: str) -> tuple[str, str]:
        """Return the codes uint8 [1, T, K] of x and its scales [1, T, 1]."""
        if x in self._quantized:
            return self._quantized[x]
        graph = self.graph
        size = graph.add("Abs", [x], x + ".abs")
        peak = graph.add("ReduceMax", [size, graph.sizes([2])], x + ".peak", keepdims=1)
        step = graph.add("Mul", [peak, graph.float(1 / INT8_MAX)], x + ".step")
        least = graph.float(float(np.finfo(np.float32).tiny))
        scale = graph.add("Max", [step, least], x + ".scale")
        flat = graph.reshape(scale, [-1], x + ".scales")
        count = graph.add("Shape", [flat], x + ".count")
        # uint8 around 128 instead of int8: int8 x int8 takes a path that is 30 times slower.
        zeros = graph.fill(count, x + ".middle", np.array([128], np.uint8))
        codes = graph.add("QuantizeLinear", [x, flat, zeros], x + ".codes", axis=1)
        self._quantized[x] = codes, scale
        return codes, scale


def vector(
    graph: Graph,
    plan: WeightPlan,
    name: str,
    size: int,
    parts: tuple[str, ...],
    divided_by: str = "",
) -> str:
    """Place a float32 vector [size] in the weight file and return its name."""
    tensor = plan.place(name, np.float32, (size,))
    plan.items.append(Vector(tensor, parts, divided_by))
    return graph.weight(tensor)


def matrix(
    graph: Graph, plan: WeightPlan, name: str, shape: tuple[int, ...], parts: tuple[str, ...]
) -> str:
    """Place stacked matrices in the weight file as float32 [N, K] and return their name."""
    tensor = plan.place(name, np.float32, shape)
    plan.items.append(Floats(tensor, parts))
    return graph.weight(tensor)


def gather_blocks(
    graph: Graph, tensors: list[str], ids: str, name: str, bits: int, block: int
) -> str:
    """Emit the rows that have these ids, dequantized; tensors: codes, scales, zero points."""
    codes, scales, points = tensors
    return graph.node(
        "GatherBlockQuantized",
        [codes, ids, scales, points],
        [name],
        CONTRIB,
        bits=bits,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
