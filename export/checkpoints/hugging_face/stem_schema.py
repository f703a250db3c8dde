"""Reads STEM models in this project's schema: a Hugging Face folder that any trainer can write.

docs/formats.md lists the keys and tensors. Tensors are named as in Llama (names.py); tensors that a STEM
layer replaces are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import field

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING, Windowed
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.tensor_files.safetensors import TensorFiles
from stem_edge.export.tensor_files.tensor import INTEGERS, Tensor, joined
from stem_edge.layers import BIASED
from stem_edge.numerics.quantize import F32

MODEL_TYPE = "stem"
# Hugging Face's name of a module with a bias -> this project's name of its matrix.
BIAS_NAMES = {tensor_name(f"layers.0.{n}").split(".")[-2]: n for n in BIASED if n != "head"}
BIAS_NAMES["lm_head"] = "head"


class Stem(Windowed, kw_only=True):
    """Keys of config.json for the model_type "stem"."""

    stem_layers: tuple[int, ...] = ()
    stem_ffn: str = "stem"
    row_rank: int = field(default=0, name="stem_rank")
    row_window: int = field(default=0, name="stem_window")
    row_experts: int = field(default=0, name="stem_experts")
    ngram_order: int = 0
    ngram_sizes: tuple[int, ...] = field(default=(), name="ngram_rows")
    ngram_end: int | None = None
    ngram_multipliers: tuple[tuple[int, ...], ...] = ()
    ngram_filler: int = 0
    engram_kernel: int = 0
    n_experts: int = field(default=0, name="num_experts")
    biases: tuple[str, ...] = ()
    qk_norm_eps: float | None = None
    post_norms: bool = False
    rope_interleaved: bool = field(default=False, name="rope_interleave")
    final_logit_softcapping: float | None = None

    def extras(self) -> dict[str, Any]:
        if unknown := [name for name in self.biases if name not in BIAS_NAMES]:
            raise ValueError(f"biases has {unknown[0]!r}; expected some of {', '.join(BIAS_NAMES)}")
        kind = SLIDING if self.sliding_window else FULL
        same = [name for name in Stem.__annotations__ if name in ModelConfig.__struct_fields__]
        return self.windows([kind] * self.num_hidden_layers) | {
            **{name: getattr(self, name) for name in same},
            "stem_layers": tuple(sorted(self.stem_layers)),
            "biases": tuple(BIAS_NAMES[name] for name in self.biases),
            "logit_softcap": self.final_logit_softcapping or 0.0,
        }

    def backbone(self, config: ModelConfig, files: TensorFiles) -> dict[str, Tensor]:
        if not config.ngram_order:
            return super().backbone(config, files)
        matrices: dict[str, Tensor] = {}
        if config.stem_ffn == "engram":
            for layer in config.stem_layers:
                matrices |= _engram(config, files, layer)
        else:
            parts = _ngrams(files, "post_projs", [(config.dim, config.row_rank)] * config.lookups)
            matrices["layers.0.project"] = joined(parts, axis=1)
        names = [name for name in config.backbone_shapes() if name not in matrices]
        return {name: files.take(self.tensor(name)) for name in names} | matrices

    def tables(self, config: ModelConfig, files: TensorFiles) -> dict[int, Tensor]:
        if config.stem_ffn == "engram":
            each = len(config.ngram_sizes) // len(config.stem_layers)
            shapes = [
                (sum(config.ngram_sizes[at : at + each]), config.row_rank)
                for at in range(0, len(config.ngram_sizes), each)
            ]
            tables = [
                files.take(f"model.layers.{layer}.engram.embed.weight", shape=shape)
                for layer, shape in zip(config.stem_layers, shapes, strict=True)
            ]
            return {config.row_layers[0]: joined(tables, axis=0)}
        if config.ngram_order:
            shapes = [(rows, config.row_rank) for rows in config.ngram_sizes]
            return {0: joined(_ngrams(files, "embedders", shapes), axis=0)}
        if config.stem_ffn == "hash-moe":
            return {layer: _read_experts(config, files, layer) for layer in config.stem_layers}
        shape = config.vocab_size, *config.row_parts()[0]
        names = {l: f"model.layers.{l}.mlp.stem_table.weight" for l in config.stem_layers}
        return {layer: files.take(name, shape=shape) for layer, name in names.items()}

    def index(self, config: ModelConfig, files: TensorFiles) -> npt.NDArray[np.int32] | None:
        if config.stem_ffn != "hash-moe":
            return None
        tensor = files.take("model.expert_of_token", INTEGERS, (config.vocab_size,))
        index = tensor.numbers()
        if index.min() < 0 or index.max() >= config.n_experts:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} has values {index.min()} to {index.max()}; expected 0 to "
                f"{config.n_experts - 1}, by num_experts"
            )
        return index.astype(np.int32)


def _ngrams(files: TensorFiles, part: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    names = [f"model.ngram_embeddings.{part}.{number}.weight" for number in range(len(shapes))]
    return [files.take(name, shape=shape) for name, shape in zip(names, shapes, strict=True)]


def _engram(config: ModelConfig, files: TensorFiles, layer: int) -> dict[str, Tensor]:
    """Take a layer's Engram (n-gram memory) from `files`; return this project's name -> tensor."""
    shapes, at = config.layer_shapes(layer), f"layers.{layer}."

    def take(part: str, shape: tuple[int, ...]) -> Tensor:
        return files.take(f"model.layers.{layer}.engram.{part}.weight", shape=shape)

    half = config.dim, shapes["project"][1]
    both = [take(part, half) for part in ("key_proj", "value_proj")]
    found: dict[str, Tensor] = {at + "project": joined(both, axis=0)}
    for name in shapes:
        if name.startswith("engram_") and name.endswith("_norm"):
            found[at + name] = take(name.removeprefix("engram_"), (config.dim,))
    if kernel := config.engram_kernel:
        taps = take("conv", (config.dim, 1, kernel))
        for tap in range(kernel):
            vector = lambda start, stop, tap=tap: taps.rows(start, stop)[:, 0, tap]
            found[f"{at}engram_conv_{tap}"] = taps.computed(vector, taps.shape[:1])
    return found


def _read_experts(config: ModelConfig, files: TensorFiles, layer: int) -> Tensor:
    """Return a layer's experts, one per row: rows of gate and up in alternation, then down."""
    count, outer = config.n_experts, (config.d_ff, config.dim)
    shapes = {"gate": outer, "up": outer, "down": outer[::-1]}
    gate, up, down = (
        files.take(f"model.layers.{layer}.mlp.experts.{name}_proj.weight", shape=(count, *shape))
        for name, shape in shapes.items()
    )

    def rows(start: int, stop: int) -> F32:
        both = np.stack([gate.rows(start, stop), up.rows(start, stop)], axis=2)
        return np.hstack(
            [both.reshape(len(both), -1), down.rows(start, stop).reshape(len(both), -1)]
        )

    return gate.computed(rows, (count, 3 * config.d_ff * config.dim))
