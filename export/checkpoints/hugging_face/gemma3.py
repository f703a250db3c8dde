"""Reads Gemma 3 and FunctionGemma: the text model, alone or inside a multimodal model.

Norm weights are stored as w - 1, except in GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma import Gemma
from stem_edge.export.tensor_files.json import Layers
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.tensor import Tensor

OLDER_INSIDE = "language_model.model."  # of multimodal models before transformers 5


class Gemma3(Gemma, kw_only=True):
    multimodal = "gemma3"
    PLACEHOLDERS: ClassVar = {"an image": ("image_token_index", 262_144)}
    sliding_window_pattern: Layers
    rope_parameters: dict[str, dict[str, Any] | None] | None = None
    rope_local_base_freq: float = 10_000.0  # as older versions of transformers write it
    query_pre_attn_scalar: float

    def __post_init__(self) -> None:
        span, numbers = self.sliding_window_pattern, range(1, self.num_hidden_layers + 1)
        self.layer_types = self.layer_types or [SLIDING if n % span else FULL for n in numbers]
        if self.rope_parameters and self.rope_scaling:
            raise ValueError("both rope_scaling and rope_parameters are given; expected one")

    def ropes(self) -> Mapping[str, Any]:
        usual = {FULL: self.rope_theta or 1_000_000.0, SLIDING: self.rope_local_base_freq}
        given = self.rope_parameters or {FULL: self.rope_scaling}
        return {kind: {"rope_theta": t} | (given.get(kind) or {}) for kind, t in usual.items()}

    def extras(self) -> dict[str, Any]:
        return super().extras() | {"attention_scale": 1 / math.sqrt(self.query_pre_attn_scalar)}

    def backbone(self, config: ModelConfig, files: TensorFiles) -> dict[str, Tensor]:
        if OLDER_INSIDE + "norm.weight" in files:
            self.__dict__["inside"] = OLDER_INSIDE
        found = super().backbone(config, files)
        norms = {n: m for n, m in found.items() if n.endswith("norm") and m.stored is None}
        return found | {n: _plus_one(m) for n, m in norms.items()}


def _plus_one(vector: Tensor) -> Tensor:
    return vector.computed(lambda start, stop: vector.rows(start, stop) + np.float32(1))
