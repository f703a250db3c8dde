"""Matrices as onnxruntime multiplies with them when it decodes: float32, or codes in blocks.

stem_edge.graph.prompts has another way, for prompts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from stem_edge.formats import BackboneFormat, MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph, GraphError
from stem_edge.graph.plan import Blocks, Floats, Piece, Vector, WeightPlan
from stem_edge.quantize import MIN_BLOCK, fitting_block

# onnxruntime packs a matrix into memory of its own while it loads: a head of 128,256 rows is cut
# into pieces of this many values, so that this never takes more than a layer's matrix does.
SPLIT_VALUES = 1 << 24


class Products(Protocol):
    """x [1, T, K] times the transpose of some matrices [N, K], stacked, in one graph."""

    graph: Graph
    plan: WeightPlan

    def norm(self, name: str, size: int, consumer: str) -> str:
        """The weight [size] of an RMS norm whose result goes into `consumer`, a product."""

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit the product with the tensors `parts`, [N, K] together; returns its result."""


class DecodeProducts:
    """Each kind of matrix in the type that a BackboneFormat gives it; int8 activations in blocks."""

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        self.graph, self.plan, self._format = graph, plan, format

    def norm(self, name: str, size: int, consumer: str) -> str:
        """The weight as it is."""
        return vector(self.graph, self.plan, name, size, (name,))

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """FusedMatMul or MatMulNBits; a matrix of very many rows becomes several of these."""
        rows, width = shape
        if self._format.bits(kind) == 32:
            weight = self._floats(name + ".weight", kind, parts, shape)
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
        """Emit `result`, rows of a matrix by their ids."""
        count, width = shape
        if self._format.bits(kind) == 32:
            return self.graph.add("Gather", [self._floats(name, kind, (name,), shape), ids], result)
        bits, block = self._format.bits(kind), self._block(name, kind, width)
        groups, place = width // block, self.plan.place
        # Zero points are explicit because kernels of different providers default differently.
        piece = Piece(
            0,
            count,
            place(name + ".codes", np.uint8, (count, width * bits // 8)),
            place(name + ".scales", np.float32, (count, groups)),
            points := place(name + ".zero_points", np.uint8, (count, -(-groups * bits // 8))),
        )
        self.plan.items.append(Blocks(name, kind, (name,), bits, block, (piece,)))
        tensors = [self.graph.weight(one) for one in (piece.codes, piece.scales, points)]
        return gather_blocks(self.graph, tensors, ids, result, bits, block)

    def _floats(
        self, name: str, kind: MatrixKind, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        tensor = self.plan.place(name, np.float32, shape)
        self.plan.items.append(Floats(tensor, kind, parts))
        return self.graph.weight(tensor)

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
        """The product with one piece, named after its codes."""
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


def vector(
    graph: Graph,
    plan: WeightPlan,
    name: str,
    size: int,
    parts: tuple[str, ...],
    divided_by: str = "",
) -> str:
    """Read a float32 vector of the weight file; returns its name."""
    tensor = plan.place(name, np.float32, (size,))
    plan.items.append(Vector(tensor, parts, divided_by))
    return graph.weight(tensor)


def gather_blocks(
    graph: Graph, tensors: list[str], ids: str, name: str, bits: int, block: int
) -> str:
    """Dequantized rows of codes, scales and zero points."""
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
