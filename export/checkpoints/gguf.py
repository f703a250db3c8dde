"""Checkpoints in a GGUF file, or in the files of a split one: llama.cpp's form of a model.

| general.architecture | models |
|---|---|
| llama | Llama, Mistral, SmolLM and others, which the file has rotate pairs |
| qwen2 | Qwen2 and Qwen2.5 |
| qwen3 | Qwen3 without experts |

The rows of q and k of llama are read in the order of Hugging Face, which rotates halves: so the model
is the same on both engines, adapters for the original fit, and onnxruntime has its fastest form.
Blocks lie within rows, so each row keeps its codes (head_padding.CodedHeads).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    SourceMatrix,
    TokenizerSource,
    check_shapes,
)
from stem_edge.export.checkpoints.head_padding import head_rows
from stem_edge.export.checkpoints.hugging_face.names import module_names
from stem_edge.export.tensor_files.gguf import GgufFile, Value, open_gguf
from stem_edge.export.tensor_files.gguf_tensor import GgufTensor
from stem_edge.export.tensor_files.json import convert_options, one_line
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.layers import BIASED, LinearRope, Llama3Rope, Rope, RopeScaling, YarnRope
from stem_edge.limits import MAX_LAYERS, MAX_WIDTH
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.rope import frequency_factors

SUFFIX = ".gguf"
LLAMA, QWEN3 = "llama", "qwen3"
ARCHITECTURES = (LLAMA, "qwen2", QWEN3)
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and 3.2 compute their factors from these; a file has only the result.
LLAMA3 = 1.0, 4.0, 8192  # low_freq_factor, high_freq_factor, original_context
# Keys that change nothing here: sizes that follow from others, and what converters note.
IGNORED = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
ADVICE = "export the original model, or a file of another converter"


class _Keys(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """Keys of an architecture, without its name before them."""

    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    attention__head_count: int
    attention__head_count_kv: int | None = None
    attention__key_length: int | None = None
    attention__value_length: int | None = None
    attention__layer_norm_rms_epsilon: float
    attention__sliding_window: int = 0
    rope__freq_base: float = 10000.0
    rope__dimension_count: int | None = None
    rope__scale_linear: float = 1.0
    rope__scaling__type: str = "none"
    rope__scaling__factor: float = 1.0
    rope__scaling__original_context_length: int | None = None
    rope__scaling__attn_factor: float = 1.0
    rope__scaling__yarn_beta_fast: float = 32.0
    rope__scaling__yarn_beta_slow: float = 1.0

    def __post_init__(self) -> None:
        # Checked here, because they size lists and divide before ModelConfig checks them.
        for name, found, most in (
            ("block_count", self.block_count, MAX_LAYERS),
            ("attention.head_count", self.attention__head_count, MAX_WIDTH),
        ):
            if not 0 < found <= most:
                raise ValueError(f"{name} is {found}; expected 1 to {most}")
        width = self.head_dim
        for name, other in (
            ("attention.value_length", self.attention__value_length),
            ("rope.dimension_count", self.rope__dimension_count),
        ):
            if other not in (None, width):
                raise ValueError(f"{name} is {other}; expected {width}, the width of a head")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention__key_length or self.embedding_length // self.attention__head_count

    def rope(self) -> RopeScaling | None:
        """Return the scaling of RoPE. Raises ValueError."""
        kind, factor = self.rope__scaling__type, self.rope__scaling__factor
        if kind == "linear" or (kind == "none" and self.rope__scale_linear != 1):
            return LinearRope(factor if kind == "linear" else self.rope__scale_linear)
        if kind == "yarn":
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            return YarnRope(
                factor,
                self.rope__scaling__original_context_length or self.context_length,
                attention_factor=usual * self.rope__scaling__attn_factor,
                beta_fast=self.rope__scaling__yarn_beta_fast,
                beta_slow=self.rope__scaling__yarn_beta_slow,
            )
        if kind != "none":
            raise ValueError(
                f"rope.scaling.type is {one_line(kind)}; expected none, linear or yarn"
            )
        return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, and the others of a split one. Raises CheckpointError."""
    file = open_gguf(path)
    architecture = _architecture(file)
    keys = _read_keys(file, architecture)
    left = dict(file.tensors)
    embedding = gguf_name("embedding")
    if embedding not in left:
        raise CheckpointError(f"{path}: no tensor {embedding}; give the file of a whole model")
    factors = left.pop(ROPE_FACTORS, None)
    try:
        config = _config(architecture, keys, left)
        if factors is not None:
            scaling = _llama3(config.layer(0).rope, factors)
            config = msgspec.structs.replace(config, rope_scaling=scaling)
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {one_line(error, 400)}; {ADVICE}") from error
    backbone = {
        name: _ordered(config, architecture, name, left.pop(gguf_name(name)))
        for name in config.backbone_shapes()
        if gguf_name(name) in left
    }
    if left:
        raise CheckpointError(
            f"{path}: tensor {one_line(min(left))} is not part of such a {architecture} model; "
            f"{ADVICE}"
        )
    checkpoint = Checkpoint(
        path=path,
        config=config,
        backbone=backbone,
        tables={},
        tokenizer=TokenizerSource("gguf", path, add_bos=None),
        names=module_names(backbone),
    )
    return check_shapes(checkpoint)


def _architecture(file: GgufFile) -> str:
    found, kind = file.keys.get("general.architecture"), file.keys.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{file.path}: general.type is {one_line(repr(kind))}; expected 'model': give the file of "
            "a whole language model"
        )
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {one_line(repr(found))}; expected one of "
            f"{', '.join(ARCHITECTURES)}: export the original model"
        )
    return str(found)


def _read_keys(file: GgufFile, architecture: str) -> _Keys:
    """Read the keys of the architecture, if no other changes the model. Raises CheckpointError."""
    at = architecture + "."
    given: dict[str, Value] = {
        key.removeprefix(at): value for key, value in file.keys.items() if key.startswith(at)
    }
    known = {*_Keys.__struct_encode_fields__, *IGNORED}
    for key, value in given.items():
        if value and (key not in known or (key.endswith("sliding_window") and at != LLAMA + ".")):
            raise CheckpointError(
                f"{file.path}: {at}{one_line(key)} is {one_line(repr(value))}; expected no such key, "
                f"or 0: {ADVICE}"
            )
    return convert_options(file.path, given, _Keys)


def _config(architecture: str, keys: _Keys, tensors: dict[str, GgufTensor]) -> ModelConfig:
    """Return the model of keys and tensors. Raises ValueError."""
    biases = {
        part: gguf_name("head.bias" if part == "head" else f"layers.0.{part}.bias")
        for part in BIASED
    }
    fields: dict[str, Any] = {
        "vocab_size": tensors[gguf_name("embedding")].shape[0],
        "dim": keys.embedding_length,
        "n_layers": keys.block_count,
        "n_heads": keys.attention__head_count,
        "n_kv_heads": keys.attention__head_count_kv or keys.attention__head_count,
        "head_dim": keys.head_dim,
        "d_ff": keys.feed_forward_length,
        "stem_layers": (),
        "norm_eps": keys.attention__layer_norm_rms_epsilon,
        "rope_theta": keys.rope__freq_base,
        "rope_scaling": keys.rope(),
        "rope_interleaved": False,
        "max_context": keys.context_length,
        "sliding_window": keys.attention__sliding_window,
        "tied_head": gguf_name("head") not in tensors,
        "biases": tuple(part for part, name in biases.items() if name in tensors),
        "qk_norm_eps": keys.attention__layer_norm_rms_epsilon if architecture == QWEN3 else None,
    }
    return ModelConfig(**fields)


def _llama3(rope: Rope, tensor: GgufTensor) -> RopeScaling:
    """Return the scaling of Llama 3 that makes these factors [head_dim / 2]. Raises ValueError."""
    if tensor.shape != (rope.width // 2,) or rope.scaling is not None:
        raise ValueError(f"{ROPE_FACTORS} {list(tensor.shape)}; expected [{rope.width // 2}] alone")
    factors = whole(tensor)
    scaling = Llama3Rope(float(factors.max()), *LLAMA3)
    expected = frequency_factors(msgspec.structs.replace(rope, scaling=scaling))
    if expected is None or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{ROPE_FACTORS} has factors other than those of Llama 3.1 and 3.2")
    return scaling


def _ordered(config: ModelConfig, architecture: str, name: str, tensor: GgufTensor) -> SourceMatrix:
    """Return a tensor with the rows of its heads in the order of halves."""
    if architecture != LLAMA or name.removesuffix(".bias").rpartition(".")[2] not in ("wq", "wk"):
        return tensor
    if tensor.shape[0] % config.head_dim:
        return tensor  # check_shapes says what is wrong
    pairs = np.arange(config.head_dim).reshape(-1, 2)
    return head_rows(tensor, pairs.T.ravel(), tensor.nbytes)
