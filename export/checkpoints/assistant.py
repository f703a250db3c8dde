"""Assistants of Gemma 4 as the exporter sees them, whichever file they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.graph.special.assistant import CLUSTERS, IN, OUT


class AssistantCheckpoint(NamedTuple):
    """An assistant by this project's names, its matrices not read yet."""

    path: Path
    config: ModelConfig  # as stem_edge.graph.formats.Assistant has it
    best: int  # clusters whose tokens are scored; 0 without clusters
    tensors: Mapping[str, Tensor]
    order: npt.NDArray[np.int32]  # tokens [clusters, tokens of each]


def with_lenders(config: ModelConfig) -> ModelConfig:
    """Return a model with a layer of each kind before its own, which borrow keys and values of these."""
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


def shapes_of(config: ModelConfig, dim: int, clusters: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors but the order of tokens. dim: of the model it drafts for."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.dim),
        "norm": (config.dim,),
        IN: (config.dim, 2 * dim),
        OUT: (dim, config.dim),
    }
    if clusters:
        shapes[CLUSTERS] = clusters, config.dim
    for number in range(config.own_kv_layers, config.n_layers):
        own = config.layer_shapes(number)
        shapes |= {f"layers.{number}.{part}": shape for part, shape in own.items()}
    return shapes


def stored_name(name: str, config: ModelConfig) -> str:
    """Return a name with the layer's number in files, which have no layers that lend."""
    if not name.startswith("layers."):
        return name
    _, number, part = name.split(".", 2)
    return f"layers.{int(number) - config.own_kv_layers}.{part}"


def take_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    named: Callable[[str], str],
    take: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Take tensors by the names that `named` gives them. Raises CheckpointError."""
    tensors = dict[str, Tensor]()
    for name, shape in shapes.items():
        tensors[name] = found = take(named(stored_name(name, config)))
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: {named(stored_name(name, config))} is {list(found.shape)}, expected "
                f"{list(shape)}; check that all files are of this model, and of its assistant"
            )
    return tensors


def in_clusters(
    where: str, ids: npt.NDArray[np.int64], tokens: int, clusters: int
) -> npt.NDArray[np.int32]:
    """Return the tokens of each cluster. where: that has the ids, for errors. Raises CheckpointError."""
    if not clusters:
        return np.empty((0, 0), np.int32)
    if tokens % clusters or not np.array_equal(np.sort(ids), np.arange(tokens)):
        raise CheckpointError(
            f"{where} does not name each of {tokens} tokens once, in {clusters} clusters of one size"
        )
    return ids.astype(np.int32).reshape(clusters, -1)
