"""Reads Gemma 3n: the text model, alone or inside a multimodal model.

Each token has several hidden states (AltUp). A low-rank product runs parallel to attention (LAuReL).
The FFN gates of the first layers are sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma import groups
from stem_edge.export.checkpoints.hugging_face.gemma_ple import PLE_LAYER, TOP, GemmaPle
from stem_edge.export.checkpoints.hugging_face.names import Names
from stem_edge.layers import LayerKind

OWN_LAYER = PLE_LAYER | {
    "altup_norm": "altup.router_norm",
    "altup_router": "altup.modality_router",
    "altup_predict": "altup.prediction_coefs",
    "altup_correct": "altup.correction_coefs",
    "laurel_in": "laurel.linear_left",
    "laurel_out": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
}
STREAMS = {"altup_in": "altup_projections", "altup_out": "altup_unembed_projections"}
SCALE = "altup.correct_output_scale"


class Gemma3n(GemmaPle, kw_only=True):
    multimodal = "gemma3n"
    # Includes the end tokens, because the towers embed all ids beyond the table.
    PLACEHOLDERS: ClassVar = {
        "an image": ("image_token_id", 262_145),
        "the end of an image": ("eoi_token_id", 262_144),
        "sound": ("audio_token_id", 262_273),
        "the end of sound": ("eoa_token_id", 262_272),
    }
    MODULES = Names(TOP, OWN_LAYER)
    TENSORS: ClassVar = {"ple_gate_scale": SCALE}
    hidden_size_per_layer_input: Annotated[int, Meta(ge=1)]
    rope_local_base_freq: float = 10_000.0  # as older versions of transformers write it
    activation_sparsity_pattern: list[float]
    altup_num_inputs: Annotated[int, Meta(ge=2)]
    altup_active_idx: int
    altup_correct_scale: bool
    laurel_rank: Annotated[int, Meta(ge=1)]

    def ropes(self) -> Mapping[str, Any]:
        usual = {FULL: self.rope_theta or 1_000_000.0, SLIDING: self.rope_local_base_freq}
        return self.rope_parameters or {kind: {"rope_theta": t} for kind, t in usual.items()}

    def extras(self) -> dict[str, Any]:
        return super().extras() | {
            "streams": self.altup_num_inputs,
            "active_stream": self.altup_active_idx,
            "ple_gate_scale": self.altup_correct_scale,
            "laurel_rank": self.laurel_rank,
        }

    def kinds(self) -> Iterator[LayerKind]:
        yield from super().kinds()
        given = self.activation_sparsity_pattern
        shares = self.for_each("activation_sparsity_pattern", given)
        for share, layers in groups(shares).items():
            if share:
                yield LayerKind(layers=layers, sparsity=share)

    def tensor(self, name: str) -> str:
        at, _, part = name.rpartition(".")
        if part in STREAMS:
            return f"{self.inside}{STREAMS[part]}.{int(at.split('.')[1]) - 1}.weight"
        return super().tensor(name)

    def unused(self, name: str) -> bool:
        """Return True for unneeded tensors, such as AltUp scales that config.json turns off."""
        return super().unused(name) or (not self.altup_correct_scale and name.endswith(SCALE))
