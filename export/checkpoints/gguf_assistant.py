"""Assistants of Gemma 4 in GGUF files, as llama.cpp's converter writes them (gemma4-assistant).

That converter leaves the clusters of tokens out, so all tokens are scored. Files that have them are read
with them: llama.cpp has names for these tensors, and ignores them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.assistant import (
    AssistantCheckpoint,
    in_clusters,
    shapes_of,
    take_tensors,
    with_lenders,
)
from stem_edge.export.checkpoints.gguf import ADVICE, open_model
from stem_edge.export.checkpoints.gguf_gemma import Gemma4Keys
from stem_edge.export.tensor_files.gguf import open_gguf
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.graph.special.assistant import CLUSTERS, IN, OUT
from stem_edge.numerics.matrix import whole

ARCHITECTURE = "gemma4-assistant"
INSIDE = {
    IN: "nextn.pre_projection.weight",
    OUT: "nextn.post_projection.weight",
    CLUSTERS: "masked_embd_centroids.weight",
}
TOKENS = "masked_embd_ordering"


class Gemma4AssistantKeys(Gemma4Keys, kw_only=True):
    """Keys of gemma4-assistant."""

    ignored = Gemma4Keys.ignored | {
        "embedding_length_out", "nextn_predict_layers", "masked_embedding.centroid_count",
    }  # fmt: skip
    masked_embedding__top_k: int = 32  # which is what all of Google's have

    def __post_init__(self) -> None:
        super().__post_init__()
        self.attention__shared_kv_layers = (
            0  # to describe each layer by itself; `with_lenders` follows
        )


def read_file(path: Path, dim: int) -> AssistantCheckpoint:
    """Open an assistant in a GGUF file. dim: of the model that it drafts for. Raises CheckpointError."""
    _, keys, left = open_model(open_gguf(path), {ARCHITECTURE: Gemma4AssistantKeys})
    try:
        config = with_lenders(keys.config(left))
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {one_line(error, 400)}; {ADVICE}") from error
    clusters = left[INSIDE[CLUSTERS]].shape[0] if INSIDE[CLUSTERS] in left else 0
    best = keys.masked_embedding__top_k if clusters else 0

    def take(name: str) -> Tensor:
        if name not in left:
            raise CheckpointError(f"{path}: no tensor {name}; {ADVICE}")
        return left.pop(name)

    def named(name: str) -> str:
        return INSIDE.get(name) or gguf_name(name)

    shapes = shapes_of(config, dim, clusters)
    tensors = take_tensors(path, shapes, config, named, take)
    ids = whole(left.pop(TOKENS)) if clusters and TOKENS in left else np.empty(0)
    order = in_clusters(f"{path}: {TOKENS}", ids.astype(np.int64), config.vocab_size, clusters)
    if left:
        raise CheckpointError(
            f"{path}: {one_line(min(left))} is not part of an assistant; {ADVICE}"
        )
    return AssistantCheckpoint(path, config, best, tensors, order)
