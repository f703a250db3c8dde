"""Reads Gemma 4's assistant (a draft model) from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.hugging_face.config import Decoder, read_config
from stem_edge.export.checkpoints.hugging_face.gemma4_assistant import (
    HEAD,
    INSIDE,
    KIND,
    TOKENS,
    Gemma4Assistant,
)
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles, open_folder
from stem_edge.export.tensor_files.tensor import INTEGERS, Tensor
from stem_edge.graph.formats import Assistant, BackboneFormat
from stem_edge.graph.special.assistant import CLUSTERS, IN, OUT
from stem_edge.numerics.matrix import whole


class AssistantCheckpoint(NamedTuple):
    """Gemma 4's draft model in a checkpoint: lazy tensors, and the token ids of its clusters."""

    described: Assistant
    tensors: Mapping[str, Tensor]
    cluster_ids: npt.NDArray[np.int32]  # token ids [clusters, tokens per cluster]


def read_assistant(path: Path, dim: int, format: BackboneFormat) -> AssistantCheckpoint:
    """Open the checkpoint folder of an assistant, which is a draft model. Raises CheckpointError.

    dim: hidden width of the main model. format: how the bundle stores the assistant's weights.
    """
    config, decoder, _, packed = read_config(path / CONFIG, {KIND: Gemma4Assistant})
    files = TensorFiles(path, open_folder(path))
    if not isinstance(decoder, Gemma4Assistant) or packed:
        raise CheckpointError(f"{path}: its matrices are codes; give an assistant with floats")
    clusters = decoder.num_centroids if decoder.use_ordered_embeddings else 0
    tensors = {
        name: files.take(tensor_name(name, config, decoder), shape=shape)
        for name, shape in shapes_of(config, dim, clusters).items()
    }
    cluster_ids = _cluster_ids(path, files, config.vocab_size, clusters)
    if left := [name for name in files.left if name != HEAD and not decoder.unused(name)]:
        raise CheckpointError(f"{path}: {one_line(left[0])} is not part of an assistant")
    best = decoder.centroid_intermediate_top_k if clusters else 0
    described = Assistant(model=config, format=format, clusters=len(cluster_ids), best=best)
    return AssistantCheckpoint(described, tensors, cluster_ids)


def shapes_of(config: ModelConfig, main_dim: int, clusters: int) -> dict[str, tuple[int, ...]]:
    """Return an assistant's tensor name -> shape. clusters: number of its token clusters."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.dim),
        "norm": (config.dim,),
        IN: (config.dim, 2 * main_dim),
        OUT: (main_dim, config.dim),
    }
    if clusters:
        shapes[CLUSTERS] = clusters, config.dim
    for number in range(config.own_kv_layers, config.n_layers):
        own = config.layer_shapes(number)
        shapes |= {f"layers.{number}.{part}": shape for part, shape in own.items()}
    return shapes


def tensor_name(name: str, config: ModelConfig, decoder: Decoder) -> str:
    """Return Hugging Face's name of a tensor. There, the assistant's first layer has number 0."""
    if name.startswith("layers."):
        _, number, part = name.split(".", 2)
        name = f"layers.{int(number) - config.own_kv_layers}.{part}"
    return INSIDE.get(name) or decoder.tensor(name)


def _cluster_ids(
    path: Path, files: TensorFiles, vocab_size: int, clusters: int
) -> npt.NDArray[np.int32]:
    """Read the token ids of each cluster [clusters, n]. Raises CheckpointError if ids are missing.

    A cluster is a group of tokens. The assistant computes logits only in the best clusters.
    """
    if not clusters:
        return np.empty((0, 0), np.int32)
    given = whole(files.take(TOKENS, INTEGERS)) if TOKENS in files else np.empty(0)
    ids = given.ravel().astype(np.int64)
    if vocab_size % clusters or not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise CheckpointError(
            f"{path}: {TOKENS} does not name each of {vocab_size} tokens once, in {clusters} clusters "
            "of one size"
        )
    return ids.astype(np.int32).reshape(clusters, -1)
