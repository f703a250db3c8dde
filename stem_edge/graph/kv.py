"""Types of the KV cache in graphs for the CPU.

A code is value / scale, rounded: -128 to 127 for int8, -8 to 7 for int4, which has two codes per
byte. Each channel of each layer has its own scale (graph/weight_plan.py).
"""

from __future__ import annotations

import platform
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.names import head_width
from stem_edge.layers import Layer

KvType = Literal["fp32", "fp16", "int8", "int4"]
KvChoice = Literal["auto", "fp32", "fp16", "int8", "int4"]
KV_CHOICES: tuple[KvChoice, ...] = get_args(KvChoice)
QUANTIZED: tuple[KvType, ...] = ("int8", "int4")
KEYS, VALUES = "keys", "values"
X86 = platform.machine().lower() in ("x86_64", "amd64")


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
