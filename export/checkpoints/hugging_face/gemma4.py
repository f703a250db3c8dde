"""Reads Gemma 4: the text model, alone or inside a multimodal model.

Layers with full attention have different heads and RoPE than the others. The last layers use the keys
and values of earlier layers, and may have a wider FFN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma_ple import GemmaPle
from stem_edge.export.tensor_files.json import one_line


class Gemma4(GemmaPle, kw_only=True):
    multimodal = "gemma4"
    PLACEHOLDERS: ClassVar = {
        "an image": ("image_token_id", 258_880),
        "a video": ("video_token_id", 258_884),
        "sound": ("audio_token_id", 258_881),
    }
    ROPES: ClassVar = {
        SLIDING: {"rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    }
    TENSORS: ClassVar = {"layer_scale": "layer_scalar"}
    global_head_dim: int
    num_global_key_value_heads: int | None = None
    use_bidirectional_attention: str | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    per_layer_config: dict[str, dict[str, int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect("use_bidirectional_attention", None, "vision")
        self.expect("rope_theta", None)
        self.layer_types = [*(self.layer_types or ())[:-1], FULL]  # as transformers does

    def extras(self) -> dict[str, Any]:
        return super().extras() | {"layer_scale": True}

    def ffn_widths(self) -> Sequence[int]:
        wide = self.num_kv_shared_layers if self.use_double_wide_mlp else 0
        return [
            width * (2 if number >= self.num_hidden_layers - wide else 1)
            for number, width in enumerate(super().ffn_widths())
        ]

    def own_heads(self) -> dict[tuple[int, int], list[int]]:
        given = self.per_layer_config
        if given is None:
            heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            return {(self.global_head_dim, heads or 0): list(self.full_layers())}
        found: dict[tuple[int, int], list[int]] = {}
        for number, own in given.items():
            if own.keys() - {"head_dim", "num_key_value_heads"} or not number.isdecimal():
                raise ValueError(
                    f"per_layer_config has {one_line(repr({number: own}))}; expected layers with "
                    "head_dim or num_key_value_heads"
                )
            sizes = own.get("head_dim", 0), own.get("num_key_value_heads", 0)
            found.setdefault(sizes, []).append(int(number))
        return {sizes: sorted(layers) for sizes, layers in found.items()}

    def keys_are_values(self, config: ModelConfig, layer: int) -> bool:
        return self.attention_k_eq_v and not config.window(layer)
