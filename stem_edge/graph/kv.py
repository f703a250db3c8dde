"""Types of keys and values in the KV cache of the CPU's graphs, and the scales of quantized ones.

A code of int8 is value / scale, rounded, from -128 to 127; of int4 from -8 to 7, two in a byte. Each
channel of each layer has a scale of its own. It follows from the greatest magnitude that the
exporter saw in that channel (stem_edge.export.quantization.kv_peaks), so that a later version may
choose other scales for the same bundle. The peaks are the first vectors of backbone.onnx.data, where
every graph finds them, also the one for prompts.
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
    """How the keys or values of a token lie in the cache."""

    dtype: npt.DTypeLike
    per_byte: int  # values in an element of uint8; otherwise 1
    bits: int

    def width(self, layer: Layer) -> int:
        """Return the elements of a head."""
        return head_width(layer) // self.per_byte

    def nbytes(self, layer: Layer) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * layer.n_kv_heads * self.width(layer) * np.dtype(self.dtype).itemsize

    @property
    def of_conv(self) -> np.dtype[Any]:
        """Return the type in which the context keeps inputs of a convolution (Engram)."""
        return np.dtype(np.float32 if self.bits == 32 else np.float16)


CACHES: dict[KvType, Cache] = {
    "fp32": Cache(np.float32, 1, 32),
    "int8": Cache(np.int8, 1, 8),
    "int4": Cache(np.uint8, 2, 4),
}


def kv_obstacle(format: BackboneFormat, kv: KvType) -> str:
    """Return why a backbone cannot have this type of keys and values, with a remedy; "" if it can."""
    if kv == "fp16":
        return "onnxruntime takes up to 40 times as long with it; take fp32 or int8, or ggml"
    if kv not in QUANTIZED or format.kv_peaks:
        return ""
    return (
        "this bundle has no scales of keys and values, which a text decides; export it again with "
        "--calibration FILE, or take fp32"
    )


# Later text has greater values than the exporter saw, and few are as great. With these factors, what
# a coarser scale loses and what is lost by cutting greater values off was least together in a real
# model (SmolLM2-135M-Instruct).
MARGINS: dict[KvType, float] = {"int8": 1.5, "int4": 0.8}


class KvFormat(NamedTuple):
    """Type of the cache, and where its peaks are: (layer, KEYS or VALUES) -> tensor."""

    type: KvType
    peaks: Mapping[tuple[int, str], Tensor]

    @property
    def cache(self) -> Cache:
        """Return how keys and values lie in the cache."""
        return CACHES[self.type]

    def scales(self, graph: Graph, layer: int, what: str) -> str:
        """Emit the scales of a layer's quantized keys or values, once for all that read them."""
        name = f"layers.{layer}.{what}.scales"
        if any(name in node.outputs for node in graph.nodes):
            return name
        factor = graph.float(MARGINS[self.type] / (2 ** (self.cache.bits - 1) - 1))
        return graph.add("Mul", [graph.weight(self.peaks[layer, what]), factor], name)


def place_peaks(
    plan: WeightPlan, config: ModelConfig, format: BackboneFormat, kv: KvType = "fp32"
) -> KvFormat:
    """Place the peaks of all layers with keys and values of their own, if the format has them.

    Raises GraphError for a type that needs them otherwise.
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
