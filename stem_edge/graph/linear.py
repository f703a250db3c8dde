"""Matrix products of the decoding graphs: float32, or with weights quantized in blocks."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

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

# onnxruntime packs each matrix into memory of its own while it loads. A head of 128,256 rows is split
# into pieces of this many values, so that packing it takes no more memory than a layer's matrix.
SPLIT_VALUES = 1 << 24


class Products:
    """Emits a graph's matrix products: x [B, T, K] times the transpose of stacked matrices [N, K].

    The BackboneFormat determines each matrix's type. With quantized matrices, MatMulNBits rounds x
    to int8 in blocks. If embedding and head are stored as one matrix, emit the head first.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        self.graph, self.plan, self.format = graph, plan, format
        self._sums: dict[tuple[str, int], str] = {}  # (x, block size) -> sums of the blocks

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Reserve space for the weight [size] of the norm before the product `consumer`."""
        return self.vector(name, size)

    def vector(
        self, name: str, size: int, parts: tuple[str, ...] = (), divided_by: str = ""
    ) -> str:
        """Reserve space for the vectors `parts` (default: `name`), concatenated to float32 [size].

        divided_by: product whose SmoothQuant factors s divide the vector; "": none. Returns the name.
        """
        tensor = self.plan.place(name, np.float32, (size,))
        self.plan.items.append(Vector(tensor, parts or (name,), divided_by))
        return self.graph.weight(tensor)

    def matrix(self, name: str, shape: tuple[int, ...], parts: tuple[str, ...] = ()) -> str:
        """Reserve space for the matrices `parts`, stacked to float32 [N, K]; return the name."""
        tensor = self.plan.place(name, np.float32, shape)
        self.plan.items.append(Floats(tensor, parts or (name,)))
        return self.graph.weight(tensor)

    def values_apart(self, layer: int) -> bool:
        """Return True if a layer's v has another weight type than q and k, so its own product."""
        at, type_of = f"layers.{layer}.", self.format.type_of
        return type_of("v", at + "v") != type_of("qkv", at + "qkv")

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit the product of x with tensors `parts`, stacked to `shape` [N, K]; return its name.

        The operator is FusedMatMul or MatMulNBits. A matrix with very many rows gets several nodes.
        """
        if self.format.bits(kind, name) == 32:
            weight = self.matrix(name + ".weight", shape, parts)
            return self.graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)
        bits, block = self.format.bits(kind, name), self._block(name, shape[1])
        return self.in_blocks(Blocks(name, kind, parts, bits, block), x, shape)

    def in_blocks(self, item: Blocks, x: str, shape: tuple[int, int]) -> str:
        """Emit x times the quantized matrix `item` [N, K]; reserve space for the matrix."""
        (rows, width), name, bits, block = shape, item.name, item.bits, item.block
        if self.format.tied and item.kind == "head":
            stored, pieces = self._stored_once(name, shape, bits, block)
        else:
            most = SPLIT_VALUES // width if len(item.parts) == 1 else rows
            stored = pieces = [
                self._piece(n, span, width, bits, block) for n, span in _spans(name, rows, most)
            ]
        self.plan.items.append(replace(item, pieces=tuple(stored)))
        made = [self._emit(x, piece, width, bits, block) for piece in pieces]
        return made[0] if len(made) == 1 else self.graph.add("Concat", made, name, axis=-1)

    def _stored_once(
        self, name: str, shape: tuple[int, int], bits: int, block: int
    ) -> tuple[list[RowRange], list[RowRange]]:
        """Reserve space for a tied head; return [the whole matrix], and its row ranges."""
        rows, width = shape
        whole = self._piece(name, (0, rows), width, bits, block, points=True)
        if self.format.split and whole.points is not None:
            parts = [
                self.plan.place(tensor.name.replace(".weight.", ".low."), np.uint8, tensor.dims)
                for tensor in (whole.codes, whole.points)
            ]
            whole = replace(whole, low=replace(whole, codes=parts[0], points=parts[1]))
        unit = LARGE_ALIGNMENT // gcd(LARGE_ALIGNMENT, width * bits // 8)  # for mappable pieces
        step = max(unit, SPLIT_VALUES // width // unit * unit)
        return [whole], [self._slice(n, whole, span) for n, span in _spans(name, rows, step)]

    def rows(self, ids: str, result: str, shape: tuple[int, int]) -> str:
        """Emit `result`: the rows `ids` [B, T] of the embedding, as float32 [B, T, K]."""
        name: MatrixKind = "embedding"  # of the matrix, and of its kind
        bits = self.format.bits(name)
        if bits == 32:
            if self.format.tied:
                (stored,) = self.plan.of(name, Floats)
                weight = self.graph.weight(replace(stored.tensor, name=name))
            else:
                weight = self.matrix(name, shape)
            return self.graph.add("Gather", [weight, ids], result)
        if bits == 4 and self.format.offsets:
            raise GraphError(f"{name}: rows of 4 bits cannot have offsets; give them 8 bits")
        if not self.plan.of(name, Blocks):
            block = self._block(name, shape[1])
            piece = self._piece(name, (0, shape[0]), shape[1], bits, block, points=True)
            self.plan.items.append(Blocks(name, name, (name,), bits, block, (piece,)))
        return self.gathered(self.plan.of(name, Blocks)[0], name, ids, result)

    def gathered(self, item: Blocks, name: str, ids: str, result: str) -> str:
        """Emit `result`: the rows `ids` of the quantized matrix `item`, as float32."""
        (piece,), weights = item.pieces, list[str]()
        # Zero points are explicit because providers' kernels have different defaults.
        stored = {"codes": piece.codes, "scales": piece.scales, "zero_points": piece.points}
        for part, tensor in stored.items():
            if tensor is None:
                raise GraphError(f"{name} has no zero points")
            dims = piece.stop, prod(tensor.dims) // piece.stop
            weights.append(self.graph.weight(replace(tensor, name=f"{name}.{part}", dims=dims)))
        return gather_blocks(self.graph, weights, ids, result, item.bits, item.block)

    def _block(self, name: str, width: int) -> int:
        block = fitting_block(width, self.format.block_size)
        if not block:
            raise GraphError(
                f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
                f"quantized in blocks; use --type fp32"
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
        """Reserve space for rows `span` of a quantized matrix. points: force zero points."""
        rows, groups = span[1] - span[0], width // block
        place, name = self.plan.place, name + ".weight"
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
        """Return rows `span` of a matrix: tensors, named after `name`, that share its bytes."""

        def part(tensor: Tensor) -> Tensor:
            row = tensor.dims[0] // whole.stop  # values per row, in flat tensors
            dims = (rows, *tensor.dims[1:]) if len(tensor.dims) > 1 else (rows * row,)
            offset = tensor.offset + tensor.nbytes // whole.stop * span[0]
            suffix = tensor.name.rpartition(".")[2]
            return replace(tensor, name=f"{name}.weight.{suffix}", dims=dims, offset=offset)

        rows, points = span[1] - span[0], whole.points if self.format.asymmetric else None
        return RowRange(*span, part(whole.codes), part(whole.scales), points and part(points))

    def _emit(self, x: str, piece: RowRange, width: int, bits: int, block: int) -> str:
        """Emit the product of x with rows (`piece`) of a quantized matrix of `width` columns."""
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
        """Sum each block of x: [B, T, K] -> [B, T, K/block]; all products of x share the result."""
        if (x, block) not in self._sums:
            graph, name = self.graph, f"{x}.by_{block}"
            blocks = graph.reshape(x, [0, 0, width // block, block], name)
            sums = graph.add("ReduceSum", [blocks, graph.sizes([3])], name + ".sums", keepdims=0)
            self._sums[x, block] = sums
        return self._sums[x, block]


def _spans(name: str, rows: int, step: int) -> list[tuple[str, tuple[int, int]]]:
    """Divide rows into (name, (start, stop)) of `step` rows; up to 2 * step rows stay undivided."""
    if rows <= 2 * max(1, step):
        return [(name, (0, rows))]
    starts = range(0, rows, step)
    return [(f"{name}.{n}", (at, min(at + step, rows))) for n, at in enumerate(starts)]


def gather_blocks(
    graph: Graph, tensors: list[str], ids: str, name: str, bits: int, block: int
) -> str:
    """Emit the rows `ids` of a quantized matrix as float32; return `name`, the name of the output.

    tensors: names of the codes, scales and zero points. block: number of values that share a scale.
    """
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
