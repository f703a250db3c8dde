"""Reads what the config.json files of Gemma 3, 3n and 4 have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING, Windowed
from stem_edge.export.checkpoints.hugging_face.keys import read_known_keys
from stem_edge.export.checkpoints.hugging_face.names import NAMES, Names
from stem_edge.export.checkpoints.hugging_face.rope import read_rope
from stem_edge.export.tensor_files.json import one_line
from stem_edge.layers import LayerKind, RopeScaling

T = TypeVar("T")
LAYER = {
    **NAMES.layer,
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
MULTIMODAL_INSIDE = "model.language_model."
# Modules of a multimodal checkpoint that the text model does not need.
TOWERS = re.compile(
    r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..+"
)


class Gemma(Windowed, kw_only=True, dict=True):
    """Keys of config.json (or its text_config) that Gemma 3, 3n and 4 share."""

    # Values that differ between the families.
    multimodal: ClassVar[str]  # model_type of a multimodal model
    # Meaning of a placeholder token -> (key of config.json that holds its id, default id).
    PLACEHOLDERS: ClassVar[Mapping[str, tuple[str, int]]]
    ROPES: ClassVar[Mapping[str, Mapping[str, Any]]]  # the defaults of transformers
    MODULES: ClassVar[Names] = Names(NAMES.top, LAYER)
    # Not keys of config.json: `outer` sets these fields for a multimodal model.
    inside: ClassVar[str] = NAMES.inside  # prefix of the names of tensors
    placeholders: ClassVar[Mapping[str, int]] = {}  # meaning of a placeholder token -> its id
    # One size for all layers, or one for each.
    intermediate_size: int | list[int]  # type: ignore[assignment]
    final_logit_softcapping: float | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    def expect(self, key: str, *wanted: object) -> None:
        """Raise ValueError unless the value of `key` is one of `wanted`."""
        if (found := getattr(self, key)) not in wanted:
            raise ValueError(
                f"{key} is {one_line(repr(found))}; of {type(self).__name__} models, only those with "
                f"{' or '.join(map(repr, wanted))} are supported"
            )

    @classmethod
    def text(cls, given: dict[str, Any]) -> dict[str, Any]:
        text, keys = given.get("text_config"), read_known_keys()
        known = keys.of_text(cls.known_as or cls.multimodal)
        usual = {k: known[k] for k in cls.__struct_fields__ if known.get(k) is not None}
        if given.get("model_type") != cls.multimodal or not isinstance(text, dict):
            return usual | given
        of_towers = keys.of(cls.multimodal).keys() - keys.of_text(cls.multimodal).keys()
        outside = given.keys() - of_towers
        # A null in text_config must not hide the dtype outside it.
        stated = {key: value for key, value in text.items() if value is not None}
        return usual | {key: given[key] for key in outside} | stated

    def outer(self, given: dict[str, Any]) -> tuple[str, ...]:
        if given.get("model_type") != self.multimodal or "text_config" not in given:
            return ()
        ids = {what: given.get(key, usual) for what, (key, usual) in self.PLACEHOLDERS.items()}
        self.__dict__["inside"] = MULTIMODAL_INSIDE
        found = {what: number for what, number in ids.items() if isinstance(number, int)}
        self.__dict__["placeholders"] = found
        return ("only the text model is exported: what sees images and hears sound is left out",)

    def read_rope(self) -> tuple[float, RopeScaling | None]:
        return self._rope_of(SLIDING)

    def ropes(self) -> Mapping[str, Any]:
        return self.rope_parameters or self.ROPES

    def _rope_of(self, kind: str) -> tuple[float, RopeScaling | None]:
        ropes = self.ropes()
        found = ropes.get(kind)
        if not isinstance(found, dict):
            message = f"rope_parameters has {one_line(repr(ropes))}; expected {kind} in it"
            raise ValueError(message)  # noqa: TRY004
        return read_rope(None, None, found, self.max_position_embeddings)

    def extras(self) -> dict[str, Any]:
        return self.windows([]) | {
            "d_ff": self.ffn_widths()[0],
            "layer_kinds": tuple(self.kinds()),
            "embedding_scale": self.rounded(math.sqrt(self.hidden_size)),
            "activation": "gelu",
            "qk_norm_eps": self.rms_norm_eps,
            "post_norms": True,
            "logit_softcap": self.final_logit_softcapping or 0.0,
            # Ids beyond the vocabulary are left out, because no prompt can have them.
            "placeholders": {
                k: n for k, n in self.placeholders.items() if 0 <= n < self.vocab_size
            },
        }

    def kinds(self) -> Iterator[LayerKind]:
        """Yield a LayerKind for each group of layers with its own RoPE, heads or FFN width."""
        theta, scaling = self._rope_of(FULL)
        yield LayerKind(layers=self.full_layers(), rope_theta=theta, rope_scaling=scaling)
        for (width, count), layers in self.own_heads().items():
            yield LayerKind(layers=tuple(layers), head_dim=width, n_kv_heads=count)
        widths = self.ffn_widths()
        for width, those in groups(widths).items():
            if width != widths[0]:
                yield LayerKind(layers=those, d_ff=width)

    def own_heads(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """Return (head_dim, n_kv_heads) -> layers with these sizes. 0: the model's default."""
        return {}

    def ffn_widths(self) -> Sequence[int]:
        """Return the width of each layer's FFN. Raises ValueError for a list of the wrong length."""
        given = self.intermediate_size
        if isinstance(given, list):
            return self.for_each("intermediate_size", given)
        return [given] * self.num_hidden_layers

    def for_each(self, key: str, given: list[T]) -> list[T]:
        """Return `given`, the value of `key`. Raises ValueError unless it has one item per layer."""
        if len(given) != self.num_hidden_layers:
            raise ValueError(
                f"{key} is {one_line(repr(given))}; expected a number for each of "
                f"{self.num_hidden_layers} layers"
            )
        return given

    def full_layers(self) -> tuple[int, ...]:
        return tuple(n for n, kind in enumerate(self.layer_types or ()) if kind == FULL)

    def rounded(self, scale: float) -> float:
        """Round a factor to the weights' type (bfloat16, for example), as transformers does."""
        wide = np.array(scale, np.float32)
        kind = self.dtype or self.torch_dtype
        if kind is None:
            raise ValueError(
                "no dtype, by whose rounding embeddings are scaled; add that of the weights"
            )
        if kind == "float16":
            return float(wide.astype(np.float16))
        if kind != "bfloat16":
            return float(wide)
        bits = wide.view(np.uint32) + np.uint32(0x7FFF)  # square roots are never ties
        return float((bits & np.uint32(0xFFFF0000)).view(np.float32))

    def names(self) -> Names:
        return self.MODULES._replace(inside=self.inside)

    def unused(self, name: str) -> bool:
        """Return True for tensors of image and audio towers, which text does not need."""
        return self.inside != NAMES.inside and TOWERS.fullmatch(name) is not None


def groups(values: Sequence[T]) -> dict[T, tuple[int, ...]]:
    """Group layers by value: value -> numbers of the layers with this value."""
    return {
        value: tuple(n for n, other in enumerate(values) if other == value)
        for value in dict.fromkeys(values)
    }
