"""What lies where in a weight file of onnxruntime: it follows from the model and the format.

A builder asks for weights as it comes to them; they get their places in that order. So a plan needs
no file, and a file whose size is the plan's holds numbers and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.graph.formats import MatrixKind
from stem_edge.graph.ir import ElementType, Tensor

# Large weights are mapped in place, in units of up to 64 KiB; small ones are copied anyway and need
# only a cache line.
LARGE_NBYTES = 1 << 20
LARGE_ALIGNMENT = 1 << 16
SMALL_ALIGNMENT = 64


@dataclass(frozen=True)
class Vector:
    """Norm or biases as float32, those of several matrices one after the other."""

    tensor: Tensor
    parts: tuple[str, ...]  # in ModelConfig.backbone_shapes; a bias that is not there is zeros
    divided_by: str = ""  # of prompts: the consumer whose balance the values are divided by


@dataclass(frozen=True)
class Balance:
    """One over the balance of a consumer's input channels: float32 [K]."""

    tensor: Tensor
    consumer: str


@dataclass(frozen=True)
class Floats:
    """Matrices as float32 [N, K], stacked."""

    tensor: Tensor
    kind: MatrixKind
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """Rows start to stop of a matrix in blocks, and where they lie."""

    start: int
    stop: int
    codes: Tensor
    scales: Tensor
    points: Tensor | None  # zero points; None: all in the middle


@dataclass(frozen=True)
class Blocks:
    """Matrices [N, K] as codes in blocks of K that share a scale, stacked."""

    name: str  # of the product
    kind: MatrixKind
    parts: tuple[str, ...]
    bits: int
    block: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Columns:
    """Matrices for prompts: int8 codes [K, N] with a scale for each of N outputs."""

    name: str
    parts: tuple[str, ...]
    consumer: str  # whose balance the input channels are multiplied with
    codes: Tensor
    scales: Tensor


Item: TypeAlias = Vector | Balance | Floats | Blocks | Columns


@dataclass
class WeightPlan:
    """The items of one weight file, in the order in which they lie there."""

    file: str
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0

    def place(self, name: str, dtype: npt.DTypeLike, dims: tuple[int, ...]) -> Tensor:
        """A tensor at the next free place."""
        kind = ElementType.of(dtype)
        nbytes = int(np.prod(dims, dtype=object)) * kind.bits // 8
        alignment = LARGE_ALIGNMENT if nbytes >= LARGE_NBYTES else SMALL_ALIGNMENT
        offset = -(-self.nbytes // alignment) * alignment
        self.nbytes = offset + nbytes
        return Tensor(name, kind, dims, file=self.file, offset=offset)
