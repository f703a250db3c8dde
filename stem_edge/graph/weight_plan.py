"""Layout of weight files for onnxruntime, computed from the model and its storage format.

Weights are in the order in which a graph builder adds them, so the file needs no header.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, TypeVar

import numpy.typing as npt

from stem_edge.graph.formats import MatrixKind
from stem_edge.graph.ir import ElementType, Tensor

# Large weights are mapped, so they begin at a unit of mapping (up to 64 KiB); small weights are copied.
LARGE_NBYTES = 1 << 20
LARGE_ALIGNMENT = 1 << 16
SMALL_ALIGNMENT = 64


@dataclass(frozen=True)
class Vector:
    """Item of a weight file: a float32 vector. SmoothQuant factors of `divided_by` divide it."""

    tensor: Tensor
    parts: tuple[str, ...]  # names in ModelConfig.backbone_shapes; an absent bias is zeros
    divided_by: str = ""  # a product in the graph for prompts; "": none


@dataclass(frozen=True)
class Named:
    """Item of a weight file that is no model tensor; the exporter finds its values by name."""

    tensor: Tensor


@dataclass(frozen=True)
class Balance:
    """Item of a weight file: 1 / s [K], for SmoothQuant factors s of the product `consumer`."""

    tensor: Tensor
    consumer: str


@dataclass(frozen=True)
class Floats:
    """Item of a weight file: stacked matrices as float32 [N, K]."""

    tensor: Tensor
    parts: tuple[str, ...]


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a quantized matrix. points: zero points. offsets: added to blocks."""

    start: int
    stop: int
    codes: Tensor
    scales: Tensor
    points: Tensor | None  # None: the middle of the range
    offsets: Tensor | None = None  # float32 [rows, blocks]


@dataclass(frozen=True)
class Blocks:
    """Item of a weight file: stacked matrices [N, K], quantized in blocks along K.

    pieces: ranges of rows, each stored on its own. step: 0, or the activation step of the input,
    which the scales then include. With a step, each block ends with a zero code, and the item has
    only columns `columns` (start, stop) of the matrices (graph/special/steps.py).
    """

    name: str  # name of the product
    kind: MatrixKind
    parts: tuple[str, ...]
    bits: int
    block: int
    pieces: tuple[RowRange, ...] = ()
    step: float = 0.0
    columns: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Columns:
    """Item of a weight file: int8 matrices for prompts, side by side [K, N], a scale per column.

    consumer: product whose SmoothQuant factors multiply the input channels; "": none.
    """

    name: str
    parts: tuple[str, ...]
    consumer: str
    codes: Tensor
    scales: Tensor


Placed = TypeVar("Placed", Floats, Blocks)
PlanItem: TypeAlias = Vector | Named | Balance | Floats | Blocks | Columns


@dataclass
class WeightPlan:
    """Layout of a weight file: its items, in file order, and its size."""

    file: str
    items: list[PlanItem] = field(default_factory=list)
    nbytes: int = 0

    def place(self, name: str, dtype: npt.DTypeLike, dims: tuple[int, ...]) -> Tensor:
        """Reserve aligned space at the end of the file for a tensor, and return the tensor."""
        kind = ElementType.of(dtype)
        nbytes = prod(dims) * kind.bits // 8
        alignment = LARGE_ALIGNMENT if nbytes >= LARGE_NBYTES else SMALL_ALIGNMENT
        offset = -(-self.nbytes // alignment) * alignment
        self.nbytes = offset + nbytes
        return Tensor(name, kind, dims, file=self.file, offset=offset)

    def of(self, part: str, kind: type[Placed]) -> list[Placed]:
        """Return the items of class `kind` that contain only the matrix `part`."""
        return [item for item in self.items if isinstance(item, kind) and item.parts == (part,)]
