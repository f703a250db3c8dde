"""Reading the assistant of a Gemma 4: a drafter whose layers have no keys and values of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import SourceMatrix
from stem_edge.export.checkpoints.hugging_face.config import read_config
from stem_edge.export.checkpoints.hugging_face.gemma4 import Gemma4
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.stored_tensor import INTEGERS
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


class AssistantCheckpoint(NamedTuple):
    """An assistant by this project's names, its matrices not read yet."""

    path: Path
    config: ModelConfig  # as stem_edge.graph.formats.Assistant has it
    best: int  # clusters whose tokens are scored; 0 without clusters
    tensors: Mapping[str, SourceMatrix]
    order: npt.NDArray[np.int32]  # tokens [clusters, tokens of each]


class Gemma4Assistant(Gemma4, kw_only=True):
    """Keys of config.json and of its text_config."""

    family = "Gemma 4 assistant"
    known_as = "gemma4_text"
    multimodal: ClassVar[str] = ""
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    backbone_hidden_size: int = 1536
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


def read_assistant(path: Path, target: ModelConfig) -> AssistantCheckpoint:
    """Open an assistant in a folder with config.json and safetensors. Raises CheckpointError."""
    config, decoder, _, packed = read_config(path / CONFIG, {KIND: Gemma4Assistant})
    if not isinstance(decoder, Gemma4Assistant) or packed:
        raise CheckpointError(f"{path}: its matrices are codes; give an assistant with floats")
    if decoder.backbone_hidden_size != target.dim:
        raise CheckpointError(
            f"{path}: drafts for a model with hidden_size {decoder.backbone_hidden_size}, but this one has "
            f"{target.dim}; give the assistant of the same model"
        )
    files, first = TensorFiles(path), config.own_kv_layers
    clusters = decoder.num_centroids if decoder.use_ordered_embeddings else 0
    shapes = _shapes(config, target, clusters)
    tensors = {
        name: files.take(INSIDE.get(name) or decoder.tensor(_theirs(name, first)))
        for name in shapes
    }
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{path}: {tensors[name].name} is {list(tensors[name].shape)}, expected {list(shape)}; "
                f"check that {CONFIG} belongs to it"
            )
    order = _order(files, config.vocab_size, clusters) if clusters else np.empty((0, 0), np.int32)
    if left := [name for name in files.names if name != HEAD and not decoder.unused(name)]:
        raise CheckpointError(f"{path}: {one_line(left[0])} is not part of an assistant")
    best = decoder.centroid_intermediate_top_k if clusters else 0
    return AssistantCheckpoint(path, config, best, tensors, order)


def _shapes(config: ModelConfig, target: ModelConfig, clusters: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.dim),
        "norm": (config.dim,),
        IN: (config.dim, 2 * target.dim),
        OUT: (target.dim, config.dim),
    }
    if clusters:
        shapes[CLUSTERS] = clusters, config.dim
    for number in range(config.own_kv_layers, config.n_layers):
        own = config.layer_shapes(number)
        shapes |= {f"layers.{number}.{part}": shape for part, shape in own.items()}
    return shapes


def _theirs(name: str, first: int) -> str:
    """Return a name with the layer's number in the checkpoint."""
    if not name.startswith("layers."):
        return name
    _, number, part = name.split(".", 2)
    return f"layers.{int(number) - first}.{part}"


def _order(files: TensorFiles, tokens: int, clusters: int) -> npt.NDArray[np.int32]:
    found = files.take(TOKENS, INTEGERS)
    ids = found.integers() if found.shape == (tokens,) else np.empty(0, np.int64)
    if tokens % clusters or not np.array_equal(np.sort(ids), np.arange(tokens)):
        raise CheckpointError(
            f"{found.path}: {TOKENS} does not name each of {tokens} tokens once, in {clusters} clusters "
            "of one size"
        )
    return ids.astype(np.int32).reshape(clusters, -1)
