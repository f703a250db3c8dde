"""Keys of a GGUF file that describe a model: those of dense ones, and what they say of its config."""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.names import NAMES, Names
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.layers import BIASED, LinearRope, Llama3Rope, Rope, RopeScaling, YarnRope
from stem_edge.limits import MAX_LAYERS, MAX_WIDTH
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.rope import frequency_factors

ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and 3.2 compute their factors from these; a file has only the result.
LLAMA3 = 1.0, 4.0, 8192  # low_freq_factor, high_freq_factor, original_context

Tensors: TypeAlias = dict[str, Tensor]  # those that were not taken yet


class Keys(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """Keys of an architecture, without its name before them."""

    # Keys that change nothing here: sizes that follow from others, and what converters note.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
    )

    lacking: ClassVar[frozenset[str]] = frozenset()  # keys that others have
    modules: ClassVar[Names] = NAMES  # of Hugging Face, for adapters
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
    attention__causal: bool = True
    rope__freq_base: float = 10000.0
    rope__dimension_count: int | None = None
    rope__scale_linear: float = 1.0
    rope__scaling__type: str = "linear"  # as in llama.cpp, where a factor alone counts
    rope__scaling__factor: float | None = None
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
        if not self.attention__causal:
            raise ValueError("attention.causal is False; expected a model that writes text")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention__key_length or self.embedding_length // self.attention__head_count

    def rope(self) -> RopeScaling | None:
        """Return the scaling of RoPE. Raises ValueError."""
        kind, given = self.rope__scaling__type, self.rope__scaling__factor
        factor = (self.rope__scale_linear if given is None else given) or 1.0
        if kind == "linear":
            return None if factor == 1 else LinearRope(factor)
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

    def config(self, tensors: Tensors) -> ModelConfig:
        """Return the model of keys and tensors. Raises ValueError."""
        biases = {
            part: gguf_name("head.bias" if part == "head" else f"layers.0.{part}.bias")
            for part in BIASED
        }
        fields: dict[str, Any] = {
            "vocab_size": tensors[gguf_name("embedding")].shape[0],
            "dim": self.embedding_length,
            "n_layers": self.block_count,
            "n_heads": self.attention__head_count,
            "n_kv_heads": self.attention__head_count_kv or self.attention__head_count,
            "head_dim": self.head_dim,
            "d_ff": self.feed_forward_length,
            "stem_layers": (),
            "norm_eps": self.attention__layer_norm_rms_epsilon,
            "rope_theta": self.rope__freq_base,
            "rope_scaling": self.rope(),
            "rope_interleaved": False,
            "max_context": self.context_length,
            "sliding_window": self.attention__sliding_window,
            "tied_head": gguf_name("head") not in tensors,
            "biases": tuple(part for part, name in biases.items() if name in tensors),
        }
        config = ModelConfig(**(fields | self.extras(tensors)))
        factors = tensors.pop(ROPE_FACTORS, None)
        if factors is None:
            return config
        scaling = _llama3(config.layer(0).rope, factors)
        return msgspec.structs.replace(config, rope_scaling=scaling)

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        """Return the fields of ModelConfig that an architecture sets otherwise. Raises ValueError."""
        return {}

    def tensor(self, name: str) -> str:
        """Return the file's name of a tensor of ModelConfig.backbone_shapes()."""
        return gguf_name(name)

    def backbone(self, config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
        """Take the tensors of ModelConfig.backbone_shapes(). Raises ValueError."""
        names = [name for name in config.backbone_shapes() if self.tensor(name) in tensors]
        return {name: tensors.pop(self.tensor(name)) for name in names}

    def tables(self, config: ModelConfig, tensors: Tensors) -> dict[int, Tensor]:
        """Take the tables; return STEM layer -> table. Raises ValueError."""
        return {}

    def index(self, config: ModelConfig) -> npt.NDArray[np.int32] | None:
        """Return the record of each token [V]; None if token i has record i."""
        return None


class Qwen2Keys(Keys, kw_only=True):
    """Keys of qwen2."""

    lacking = frozenset({"attention.sliding_window"})


class Qwen3Keys(Qwen2Keys, kw_only=True):
    """Keys of qwen3."""

    def extras(self, tensors: Tensors) -> dict[str, Any]:
        return {"qk_norm_eps": self.attention__layer_norm_rms_epsilon}


def _llama3(rope: Rope, tensor: Tensor) -> RopeScaling:
    """Return the scaling of Llama 3 that makes these factors [head_dim / 2]. Raises ValueError."""
    if tensor.shape != (rope.width // 2,) or rope.scaling is not None:
        raise ValueError(f"{ROPE_FACTORS} {list(tensor.shape)}; expected [{rope.width // 2}] alone")
    factors = whole(tensor)
    scaling = Llama3Rope(float(factors.max()), *LLAMA3)
    expected = frequency_factors(msgspec.structs.replace(rope, scaling=scaling))
    if expected is None or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{ROPE_FACTORS} has factors other than those of Llama 3.1 and 3.2")
    return scaling
