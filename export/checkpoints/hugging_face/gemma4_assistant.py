"""Reads the config.json of Gemma 4's assistant: a draft model that reads Gemma 4's KV cache."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.gemma4 import Gemma4
from stem_edge.graph.special.assistant import CLUSTERS, IN, OUT

KIND = "gemma4_assistant"
INSIDE = {
    IN: "pre_projection.weight",
    OUT: "post_projection.weight",
    CLUSTERS: "masked_embedding.centroids.weight",
}
TOKENS, HEAD = "masked_embedding.token_ordering", "lm_head.weight"


class Gemma4Assistant(Gemma4, kw_only=True):
    """Keys of the assistant's config.json and of its text_config."""

    known_as = "gemma4_text"
    multimodal: ClassVar[str] = ""
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_kv_shared_layers = 0  # `with_kv_layers` sets borrowing later
        self.expect("hidden_size_per_layer_input", 0)
        self.expect("tie_word_embeddings", True)

    @classmethod
    def text(cls, given: dict[str, Any]) -> dict[str, Any]:
        rows = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        outside = {key: value for key, value in given.items() if value is not None}
        inside = outside.pop("text_config", None)
        return super().text(rows | (inside if isinstance(inside, dict) else {}) | outside)

    def model(self) -> ModelConfig:
        return with_kv_layers(super().model())


def with_kv_layers(config: ModelConfig) -> ModelConfig:
    """Prepend layers that stand for the main model's KV caches, one per kind of attention."""
    kinds = dict[object, int]()
    for number, layer in enumerate(config.layers):
        kinds.setdefault((layer.rope, layer.window, layer.n_kv_heads), number)
    order = [*kinds.values(), *range(config.n_layers)]

    def moved(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new for new, old in enumerate(order) if old in layers)

    windows = config.window_layers
    return msgspec.structs.replace(
        config,
        n_layers=len(order),
        borrowed_kv_layers=config.n_layers,
        window_layers=None if windows is None else moved(windows),
        layer_kinds=tuple(
            msgspec.structs.replace(kind, layers=moved(kind.layers)) for kind in config.layer_kinds
        ),
    )
