"""Layout of weight files for onnxruntime, computed from the model and its storage format.

Weights are in the order in which a graph builder adds them, so the file needs no header. Before them are the
peaks of keys and values, if they may be quantized: for each channel, the greatest magnitude that the exporter
saw (export/quantization/kv_peaks.py). A scale is computed from a peak, so later versions may compute other scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat, MatrixKind
from stem_edge.graph.ir import ElementType, Graph, GraphError, Tensor
from stem_edge.graph.kv import CACHES, KEYS, QUANTIZED, VALUES, Cache, KvType
from stem_edge.graph.names import head_width

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
    """Rows [start, stop) of a quantized matrix. points: zero points. offsets: added to blocks.

    low: 4-bit codes of the rest, values minus what the codes say, in steps of scale / LOW_STEPS.
    """

    start: int
    stop: int
    codes: Tensor
    scales: Tensor
    points: Tensor | None  # None: the middle of the range
    offsets: Tensor | None = None  # float32 [rows, blocks]
    low: RowRange | None = None


@dataclass(frozen=True)
class Blocks:
    """One entry of a weight file: stacked matrices [N, K], quantized in blocks along K.

    pieces: ranges of rows that are stored one after another. step: step size of the rounded input of the
    product, by which the stored scales are multiplied; 0: the input is not rounded. If there is a step, each block
    ends with a zero code, and only the columns start..stop of `columns` are stored (graph/special/steps.py).
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


# Peaks are multiplied by these factors: later text can have greater values than the exporter saw, but few values
# come near a peak. In SmolLM2-135M-Instruct, they had the least loss by coarse scales and cut-off values.
MARGINS: dict[KvType, float] = {"int8": 1.5, "int4": 0.8}


class KvFormat(NamedTuple):
    """KV cache type, peaks for its scales, and which kernels of attention read it."""

    type: KvType
    peaks: Mapping[tuple[int, str], Tensor]  # (layer, KEYS or VALUES) -> greatest magnitudes
    widened: bool = False  # codes become float32 first, which is faster for many tokens
    unblocked: bool = False  # all scores of a head at once, which takes memory for many tokens

    @property
    def cache(self) -> Cache:
        return CACHES[self.type]

    def scales(self, graph: Graph, layer: int, what: str) -> str:
        """Emit scales of a layer's quantized KEYS or VALUES (`what`), once; return their name."""
        name = f"layers.{layer}.{what}.scales"
        if any(name in node.outputs for node in graph.nodes):
            return name
        factor = graph.float(MARGINS[self.type] / (2 ** (self.cache.bits - 1) - 1))
        return graph.add("Mul", [graph.weight(self.peaks[layer, what]), factor], name)


def place_peaks(
    plan: WeightPlan, config: ModelConfig, format: BackboneFormat, kv: KvType = "fp32"
) -> KvFormat:
    """Place greatest magnitudes of keys and values in the weight file, if the format has them.

    Raises GraphError if the KV cache type needs them and the format has none.
    """
    placed = dict[tuple[int, str], Tensor]()
    if kv in QUANTIZED and not format.kv_peaks:
        raise GraphError(f"keys and values cannot be {kv}: the weights have no peaks of them")
    for number in range(config.own_kv_layers) if format.kv_peaks else ():
        layer = config.layer(number)
        dims = (1, layer.n_kv_heads, 1, head_width(layer))
        for what in (KEYS, VALUES):
            tensor = plan.place(f"layers.{number}.{what}.peaks", np.float32, dims)
            plan.items.append(Named(tensor))
            placed[number, what] = tensor
    return KvFormat(kv, placed)
