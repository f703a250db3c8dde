"""Matrix products that decode: float32, or quantized in blocks."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Protocol

import numpy as np

from stem_edge.graph.formats import BackboneFormat, MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph, GraphError, Tensor
from stem_edge.graph.weight_plan import (
    LARGE_ALIGNMENT,
    Blocks,
    Floats,
    RowRange,
    Vector,
    WeightPlan,
)
from stem_edge.numerics.quantize import MIN_BLOCK, fitting_block

# onnxruntime packs a matrix into memory of its own while it loads. A head of 128,256 rows is split
# into pieces of this many values, so that this never takes more than a layer's matrix does.
SPLIT_VALUES = 1 << 24


class Products(Protocol):
    """Products of one graph: x [B, T, K] times the transpose of stacked matrices [N, K]."""

    graph: Graph
    plan: WeightPlan

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Return the weight [size] of an RMS norm that feeds the product `consumer`."""

    def values_apart(self, layer: int) -> bool:
        """Return whether a layer's values have a separate product."""

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit the product with tensors `parts`, stacked to `shape` [N, K]; return its result."""


class DecodeProducts:
    """Products that decode: each matrix has the type that its BackboneFormat names.

    Quantized matrices are multiplied with activations in blocks of int8. Where embedding and head
    are one matrix that is stored once, its head must be emitted before its rows.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        self.graph, self.plan, self.format = graph, plan, format
        self._sums: dict[tuple[str, int], str] = {}  # x and its blocks -> the sums of these

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Return the weight unchanged: nothing is balanced here."""
        return vector(self.graph, self.plan, name, size, (name,))

    def values_apart(self, layer: int) -> bool:
        """Return whether a layer's values have another type than its queries and keys."""
        return self.format.values_apart(layer)

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit FusedMatMul or MatMulNBits, for a matrix of very many rows several of these."""
        if self.format.bits(kind, name) == 32:
            weight = matrix(self.graph, self.plan, name + ".weight", shape, parts)
            return self.graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)
        return self.in_blocks(name, kind, x, parts, shape, self._block(name, kind, shape[1]))

    def in_blocks(
        self,
        name: str,
        kind: MatrixKind,
        x: str,
        parts: tuple[str, ...],
        shape: tuple[int, int],
        block: int,
        step: float = 0.0,
    ) -> str:
        """Emit MatMulNBits. step: of x, in whole steps (Blocks.step)."""
        (rows, width), bits = shape, self.format.bits(kind, name)
        if self.format.tied and kind == "head":
            stored, pieces = self._stored_once(name, shape, bits, block)
        else:
            most = SPLIT_VALUES // width if len(parts) == 1 else rows
            stored = pieces = [
                self._piece(n, span, width, bits, block) for n, span in _spans(name, rows, most)
            ]
        self.plan.items.append(Blocks(name, kind, parts, bits, block, tuple(stored), step))
        made = [self._emit(x, piece, width, bits, block) for piece in pieces]
        return made[0] if len(made) == 1 else self.graph.add("Concat", made, name, axis=-1)

    def _stored_once(
        self, name: str, shape: tuple[int, int], bits: int, block: int
    ) -> tuple[list[RowRange], list[RowRange]]:
        """Place a matrix for gathering rows, too; return it, and the pieces to multiply with."""
        rows, width = shape
        whole = self._piece(name, (0, rows), width, bits, block, points=True)
        unit = LARGE_ALIGNMENT // gcd(
            LARGE_ALIGNMENT, width * bits // 8
        )  # where mappings can begin
        step = max(unit, SPLIT_VALUES // width // unit * unit)
        return [whole], [self._slice(n, whole, span) for n, span in _spans(name, rows, step)]

    def rows(
        self, name: str, kind: MatrixKind, ids: str, result: str, shape: tuple[int, int]
    ) -> str:
        """Emit `result`: the rows of a matrix that have these ids."""
        bits = self.format.bits(kind)
        if bits == 32:
            if self.format.tied:
                weight = self.graph.weight(replace(self.plan.tensors(name)[0], name=name))
            else:
                weight = matrix(self.graph, self.plan, name, shape, (name,))
            return self.graph.add("Gather", [weight, ids], result)
        if bits == 4 and self.format.offsets:
            raise GraphError(f"{name}: rows of 4 bits cannot have offsets; give them 8 bits")
        return self.gathered(name, kind, ids, result, shape, self._block(name, kind, shape[1]))

    def gathered(
        self, name: str, kind: MatrixKind, ids: str, result: str, shape: tuple[int, int], block: int
    ) -> str:
        """Emit `result`: rows of a matrix in blocks of this size, dequantized."""
        (count, width), bits, place = shape, self.format.bits(kind), self.plan.place
        groups, codes = width // block, (count, width * bits // 8)
        # Zero points are explicit because providers' kernels have different defaults.
        dims = {".codes": codes, ".scales": (count, groups)}
        dims[".zero_points"] = (count, -(-groups * bits // 8))
        if self.format.tied:
            stored = zip(dims.items(), self.plan.tensors(name), strict=True)
            tensors = [replace(t, name=name + part, dims=shape) for (part, shape), t in stored]
        else:
            types = (np.uint8, np.float32, np.uint8)
            tensors = [
                place(name + part, dtype, shape)
                for (part, shape), dtype in zip(dims.items(), types, strict=True)
            ]
            piece = RowRange(0, count, *tensors)
            self.plan.items.append(Blocks(name, kind, (name,), bits, block, (piece,)))
        weights = [self.graph.weight(tensor) for tensor in tensors]
        return gather_blocks(self.graph, weights, ids, result, bits, block)

    def _block(self, name: str, kind: MatrixKind, width: int) -> int:
        block = fitting_block(width, self.format.block_size)
        if not block:
            raise GraphError(
                f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
                f"quantized in blocks; use --bits {kind}=32, or --backbone fp32 --head fp32"
            )
        return block

    def _piece(
        self,
        name: str,
        span: tuple[int, int],
        width: int,
        bits: int,
        block: int,
        *,
        points: bool = False,
    ) -> RowRange:
        """Place rows of a matrix in blocks; points: with zero points, though symmetric."""
        rows, groups, place, name = (
            span[1] - span[0],
            width // block,
            self.plan.place,
            name + ".weight",
        )
        codes = place(name + ".codes", np.uint8, (rows, groups, block * bits // 8))
        scales = place(name + ".scales", np.float32, (rows * groups,))
        if self.format.offsets and bits == 4:
            offsets = place(name + ".offsets", np.float32, (rows, groups))
            return RowRange(*span, codes, scales, None, offsets)
        zeros = None
        if self.format.asymmetric or points:
            nbytes = rows * -(-groups * bits // 8)
            zeros = place(name + ".zero_points", np.uint8, (nbytes,))
        return RowRange(*span, codes, scales, zeros)

    def _slice(self, name: str, whole: RowRange, span: tuple[int, int]) -> RowRange:
        """Return some rows of a placed matrix, as separate tensors over the same bytes."""

        def part(tensor: Tensor) -> Tensor:
            row = tensor.dims[0] // whole.stop  # values, of flat tensors
            dims = (rows, *tensor.dims[1:]) if len(tensor.dims) > 1 else (rows * row,)
            offset = tensor.offset + tensor.nbytes // whole.stop * span[0]
            suffix = tensor.name.rpartition(".")[2]
            return replace(tensor, name=f"{name}.weight.{suffix}", dims=dims, offset=offset)

        rows, points = span[1] - span[0], whole.points if self.format.asymmetric else None
        return RowRange(*span, part(whole.codes), part(whole.scales), points and part(points))

    def _emit(self, x: str, piece: RowRange, width: int, bits: int, block: int) -> str:
        """Emit the product with one piece, named like its codes."""
        tensors = [piece.codes, piece.scales, *([piece.points] if piece.points else [])]
        name = piece.codes.name.removesuffix(".weight.codes")
        product = self.graph.node(
            "MatMulNBits",
            [x, *(self.graph.weight(tensor) for tensor in tensors)],
            [name + ".scaled" if piece.offsets else name],
            CONTRIB,
            K=width,
            N=piece.stop - piece.start,
            bits=bits,
            block_size=block,
            accuracy_level=4,
        )
        if piece.offsets is None:
            return product
        added = [self._block_sums(x, width, block), self.graph.weight(piece.offsets)]
        moved = self.graph.node("FusedMatMul", added, [name + ".moved"], CONTRIB, transB=1)
        return self.graph.add("Add", [product, moved], name)

    def _block_sums(self, x: str, width: int, block: int) -> str:
        """Emit the sum of each block of x, once for all that are multiplied with it."""
        if (x, block) not in self._sums:
            graph, name = self.graph, f"{x}.by_{block}"
            blocks = graph.reshape(x, [0, 0, width // block, block], name)
            sums = graph.add("ReduceSum", [blocks, graph.sizes([3])], name + ".sums", keepdims=0)
            self._sums[x, block] = sums
        return self._sums[x, block]


def _spans(name: str, rows: int, step: int) -> list[tuple[str, tuple[int, int]]]:
    """Name spans of `step` rows of a matrix; up to twice as many rows stay together."""
    if rows <= 2 * max(1, step):
        return [(name, (0, rows))]
    starts = range(0, rows, step)
    return [(f"{name}.{n}", (at, min(at + step, rows))) for n, at in enumerate(starts)]


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
