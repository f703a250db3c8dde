"""Types of the KV cache in graphs for the CPU, and the scales of quantized keys and values.

A code is value / scale, rounded: -128 to 127 for int8, -8 to 7 for int4, which has two codes per
byte. Each channel of each layer has its own scale, computed from a peak: the greatest magnitude
that the exporter saw in the channel (export/quantization/kv_peaks.py). Bundles store peaks, so
later versions may compute other scales. All graphs read them from the start of backbone.onnx.data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph, GraphError, Tensor
from stem_edge.graph.names import head_width
from stem_edge.graph.weight_plan import Named, WeightPlan
from stem_edge.layers import Layer

KvType = Literal["fp32", "fp16", "int8", "int4"]
KvChoice = Literal["auto", "fp32", "fp16", "int8", "int4"]
KV_CHOICES: tuple[KvChoice, ...] = get_args(KvChoice)
QUANTIZED: tuple[KvType, ...] = ("int8", "int4")
KEYS, VALUES = "keys", "values"


class Cache(NamedTuple):
    """Storage type of keys and values in the KV cache."""

    dtype: npt.DTypeLike
    per_byte: int  # values per array element: 2 for int4, else 1
    bits: int

    def width(self, layer: Layer) -> int:
        """Return the number of array elements of one token's key in one head of a layer."""
        return head_width(layer) // self.per_byte

    def nbytes(self, layer: Layer) -> int:
        """Return the bytes of one token's keys and values in a layer."""
        return 2 * layer.n_kv_heads * self.width(layer) * np.dtype(self.dtype).itemsize

    @property
    def of_conv(self) -> np.dtype[Any]:
        """Type of cached inputs of Engram's convolution: float32 if `bits` is 32, else float16."""
        return np.dtype(np.float32 if self.bits == 32 else np.float16)


CACHES: dict[KvType, Cache] = {
    "fp32": Cache(np.float32, 1, 32),
    "int8": Cache(np.int8, 1, 8),
    "int4": Cache(np.uint8, 2, 4),
}


def kv_obstacle(format: BackboneFormat, kv: KvType) -> str:
    """Return why a backbone cannot have this type of KV cache, with a remedy; "" if it can."""
    if kv == "fp16":
        return "onnxruntime takes up to 40 times as long with it; take fp32 or int8, or ggml"
    if kv not in QUANTIZED or format.kv_peaks:
        return ""
    return (
        "this bundle has no scales of keys and values, which a text decides; export it again with "
        "--calibration FILE, or take fp32"
    )


# Peaks are multiplied by these factors: later text can have greater values than the exporter saw, but few values
# come near a peak. In SmolLM2-135M-Instruct, they had the least loss by coarse scales and cut-off values.
MARGINS: dict[KvType, float] = {"int8": 1.5, "int4": 0.8}


class KvFormat(NamedTuple):
    """KV cache type, and peaks for its scales. widened: attention reads codes as float32."""

    type: KvType
    peaks: Mapping[tuple[int, str], Tensor]  # (layer, KEYS or VALUES) -> greatest magnitudes
    widened: bool = False  # which is faster for many tokens

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
