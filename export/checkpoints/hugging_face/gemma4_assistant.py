"""Reading the assistant of a Gemma 4: a drafter whose layers have no keys and values of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.assistant import (
    AssistantCheckpoint,
    in_clusters,
    shapes_of,
    take_tensors,
    with_lenders,
)
from stem_edge.export.checkpoints.hugging_face.config import read_config
from stem_edge.export.checkpoints.hugging_face.gemma4 import Gemma4
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.tensor import INTEGERS
from stem_edge.graph.special.assistant import CLUSTERS, IN, OUT

KIND = "gemma4_assistant"
OUTSIDE = (
    "dtype", "torch_dtype", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids",
    "centroid_intermediate_top_k", "tie_word_embeddings", "quantization_config",
)  # fmt: skip
INSIDE = {
    IN: "pre_projection.weight",
    OUT: "post_projection.weight",
    CLUSTERS: "masked_embedding.centroids.weight",
}
TOKENS, HEAD = "masked_embedding.token_ordering", "lm_head.weight"


class Gemma4Assistant(Gemma4, kw_only=True):
    """Keys of config.json and of its text_config."""

    family = "Gemma 4 assistant"
    known_as = "gemma4_text"
    multimodal: ClassVar[str] = ""
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_kv_shared_layers = 0  # to describe each layer by itself; `with_lenders` follows
        self.expect("hidden_size_per_layer_input", 0)
        self.expect("tie_word_embeddings", True)

    @classmethod
    def text(cls, given: dict[str, Any]) -> dict[str, Any]:
        inside = given.get("text_config")
        outside = {key: given[key] for key in OUTSIDE if given.get(key) is not None}
        return (inside if isinstance(inside, dict) else {}) | outside

    def model(self) -> ModelConfig:
        return with_lenders(super().model())


def read_folder(path: Path, dim: int) -> AssistantCheckpoint:
    """Open an assistant in a folder with config.json and safetensors. Raises CheckpointError.

    dim: of the model that it drafts for.
    """
    config, decoder, _, packed = read_config(path / CONFIG, {KIND: Gemma4Assistant})
    if not isinstance(decoder, Gemma4Assistant) or packed:
        raise CheckpointError(f"{path}: its matrices are codes; give an assistant with floats")
    files = TensorFiles(path)
    clusters = decoder.num_centroids if decoder.use_ordered_embeddings else 0
    best = decoder.centroid_intermediate_top_k if clusters else 0

    def named(name: str) -> str:
        return INSIDE.get(name) or decoder.tensor(name)

    shapes = shapes_of(config, dim, clusters)
    tensors = take_tensors(path, shapes, config, named, files.take)
    ids = files.take(TOKENS, INTEGERS).numbers() if clusters else np.empty(0)
    order = in_clusters(
        f"{path}: {TOKENS}", ids.ravel().astype(np.int64), config.vocab_size, clusters
    )
    if left := [name for name in files.names if name != HEAD and not decoder.unused(name)]:
        raise CheckpointError(f"{path}: {one_line(left[0])} is not part of an assistant")
    return AssistantCheckpoint(path, config, best, tensors, order)
