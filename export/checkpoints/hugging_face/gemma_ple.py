"""Reads what Gemma 3n and 4 share: per-layer embeddings (PLE), and reuse of earlier layers' K and V.

The checkpoint has one PLE table. A token's row in it holds the token's vectors for all layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.gemma import LAYER, Gemma
from stem_edge.export.checkpoints.hugging_face.names import NAMES, Names
from stem_edge.export.checkpoints.hugging_face.packed import UNUSED
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.tensor import Tensor

TABLE = "embed_tokens_per_layer.weight"
CONTEXT = "per_layer_model_projection.weight"
TOP = {**NAMES.top, "ple_norm": "per_layer_projection_norm"}
PLE_LAYER = {
    **LAYER,
    "ple_gate": "per_layer_input_gate",
    "ple_out": "per_layer_projection",
    "ple_post_norm": "post_per_layer_input_norm",
}
BORROWED = (
    r"layers\.(\d{1,4})\.self_attn\.(k_proj|v_proj|k_norm)\."
    r"(weight|weight_scale|input_activation_scale|output_activation_scale)"
)


class GemmaPle(Gemma, kw_only=True):
    """Keys of config.json that Gemma 3n and 4 share, such as those of per-layer embeddings (PLE)."""

    packable = True
    MODULES = Names(TOP, PLE_LAYER)
    TENSORS: ClassVar[Mapping[str, str]] = {}  # part of a layer -> tensor without a module
    vocab_size_per_layer_input: int
    hidden_size_per_layer_input: int
    num_kv_shared_layers: int

    def __post_init__(self) -> None:
        self.expect("rope_scaling", None)

    def extras(self) -> dict[str, Any]:
        extras = super().extras() | {
            "borrowed_kv_layers": self.num_kv_shared_layers,
            "attention_scale": 1.0,
            "v_norm": True,
        }
        records, width = self.vocab_size_per_layer_input, self.hidden_size_per_layer_input
        if not width:
            return extras
        return extras | {
            "stem_layers": tuple(range(self.num_hidden_layers)),
            "stem_ffn": "ple",
            "ple_width": width,
            "ple_scale": self.rounded(math.sqrt(width)),
            "ple_records": 0 if records == self.vocab_size else records,
        }

    def tensor(self, name: str) -> str:
        at, _, part = name.rpartition(".")
        if part == "ple_context":
            return self.inside + CONTEXT
        if part in self.TENSORS:
            return f"{self.inside}{at}.{self.TENSORS[part]}"
        return super().tensor(name)

    def widths(self, config: ModelConfig) -> dict[str, int]:
        table = {self.inside + TABLE: config.n_layers * config.ple_width}
        return super().widths(config) | table

    def backbone(self, config: ModelConfig, files: TensorFiles) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        context, width = None, config.n_layers * config.ple_width
        if width:
            context = files.take(self.inside + CONTEXT, shape=(width, config.dim))
        for name in config.backbone_shapes():
            if name.endswith(".ple_context") and context is not None:
                start = int(name.split(".")[1]) * config.ple_width
                found[name] = context.part(start, start + config.ple_width)
            elif name.endswith(".wv") and self.keys_are_values(config, int(name.split(".")[1])):
                found[name] = found[name.replace("wv", "wk")]
            else:
                found[name] = files.take(self.tensor(name))
        return found

    def keys_are_values(self, config: ModelConfig, layer: int) -> bool:
        """Return True if a layer has no matrix for V and uses its matrix for K instead."""
        return False

    def tables(self, config: ModelConfig, files: TensorFiles) -> dict[int, Tensor]:
        if not config.ple_width:
            return {}
        width = config.ple_width
        table = files.take(self.inside + TABLE, shape=(config.records, config.n_layers * width))
        return dict(zip(config.stem_layers, table.columns(width), strict=True))

    def index(self, config: ModelConfig, files: TensorFiles) -> npt.NDArray[np.int32] | None:
        """Return each token's row in the tables [V], or 0 if missing; None if token i has row i."""
        if not config.ple_records:
            return None
        ids = np.arange(config.vocab_size, dtype=np.int32)
        return np.where(ids < config.ple_records, ids, np.int32(0))

    def unused(self, name: str) -> bool:
        """Return True for unneeded tensors: for example, k_proj where an earlier layer's K is used."""
        found = re.fullmatch(re.escape(self.inside) + BORROWED, name)
        own = self.num_hidden_layers - self.num_kv_shared_layers
        borrowed = found is not None and own <= int(found[1]) < self.num_hidden_layers
        return bool(borrowed or super().unused(name) or UNUSED.fullmatch(name))
