"""Reading Gemma 3n: config.json of the text model, alone or in a multimodal one, and its tensors.

A token has several hidden states (AltUp), a product of low rank stands beside attention (LAuReL),
and the gates of the first layers are sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.gemma_ple import PLE_LAYER, TOP, GemmaPle
from stem_edge.export.checkpoints.hugging_face.names import Names
from stem_edge.export.tensor_files.json import one_line
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
SPARSE_LAYERS, SPARSITY = 10, 0.95  # without activation_sparsity_pattern, in deeper models

T = TypeVar("T")


class Gemma3n(GemmaPle, kw_only=True):
    """Keys of config.json, or of its text_config."""

    family = "Gemma 3n"
    multimodal = "gemma3n"
    # The tokens around images and sound, too, because towers embed all ids beyond the table's.
    PLACEHOLDERS: ClassVar = {
        "an image": ("image_token_id", 262_145),
        "the end of an image": ("eoi_token_id", 262_144),
        "sound": ("audio_token_id", 262_273),
        "the end of sound": ("eoa_token_id", 262_272),
    }
    PATTERN = 5
    TENSORS: ClassVar = {"ple_gate_scale": SCALE}
    vocab_size: int = 262_400
    hidden_size: int = 2048
    # One size for all layers, or one for each.
    intermediate_size: int | list[int] = 16_384  # type: ignore[assignment]
    num_hidden_layers: int = 35
    num_key_value_heads: int | None = 2
    max_position_embeddings: int = 32_768
    final_logit_softcapping: float | None = 30.0
    num_kv_shared_layers: int = 15
    rope_local_base_freq: float = 10_000.0  # as older versions of transformers write it
    activation_sparsity_pattern: list[float] | None = None
    altup_num_inputs: int = 4
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    laurel_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (
            ("altup_num_inputs", 2),
            ("laurel_rank", 1),
            ("hidden_size_per_layer_input", 1),
        ):
            if (found := getattr(self, key)) < least:
                raise ValueError(f"{key} is {found}; expected at least {least}")

    def ropes(self) -> Mapping[str, Any]:
        usual = {FULL: self.rope_theta or 1_000_000.0, SLIDING: self.rope_local_base_freq}
        return self.rope_parameters or {kind: {"rope_theta": t} for kind, t in usual.items()}

    def extras(self) -> dict[str, Any]:
        return super().extras() | {
            "d_ff": self._widths()[0],
            "streams": self.altup_num_inputs,
            "active_stream": self.altup_active_idx,
            "ple_gate_scale": self.altup_correct_scale,
            "laurel_rank": self.laurel_rank,
        }

    def kinds(self) -> Iterator[LayerKind]:
        """Yield how layers of full attention, of other widths and with sparse gates differ."""
        yield from super().kinds()
        widths = self._widths()
        for width, layers in groups(widths).items():
            if width != widths[0]:
                yield LayerKind(layers=layers, d_ff=width)
        for share, layers in groups(self._sparsity()).items():
            if share:
                yield LayerKind(layers=layers, sparsity=share)

    def _widths(self) -> Sequence[int]:
        given = self.intermediate_size
        if isinstance(given, list):
            return self._for_each("intermediate_size", given)
        return [given] * self.num_hidden_layers

    def _sparsity(self) -> Sequence[float]:
        if self.activation_sparsity_pattern is not None:
            return self._for_each("activation_sparsity_pattern", self.activation_sparsity_pattern)
        sparse = SPARSE_LAYERS if self.num_hidden_layers > SPARSE_LAYERS else 0
        return [SPARSITY] * sparse + [0.0] * (self.num_hidden_layers - sparse)

    def _for_each(self, key: str, given: list[T]) -> list[T]:
        if len(given) != self.num_hidden_layers:
            raise ValueError(
                f"{key} is {one_line(repr(given))}; expected a number for each of "
                f"{self.num_hidden_layers} layers"
            )
        return given

    def names(self) -> Names:
        return Names(TOP, OWN_LAYER, self.inside)

    def tensor(self, name: str) -> str:
        at, _, part = name.rpartition(".")
        if part in STREAMS:
            return f"{self.inside}{STREAMS[part]}.{int(at.split('.')[1]) - 1}.weight"
        return super().tensor(name)

    def unused(self, name: str) -> bool:
        """Return True also for factors of the active stream that config.json turns off."""
        return super().unused(name) or (not self.altup_correct_scale and name.endswith(SCALE))


def groups(values: Sequence[T]) -> dict[T, tuple[int, ...]]:
    """Return value -> the layers that have it."""
    return {
        value: tuple(n for n, other in enumerate(values) if other == value)
        for value in dict.fromkeys(values)
    }
