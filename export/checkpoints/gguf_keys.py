"""Translates the keys of a GGUF file to those that Hugging Face's config.json would have.

For Gemma 3, norm weights in the file already include the 1 that transformers adds. The factor of
attention scores is not in the file; it is chosen as in llama.cpp. The factor of embeddings is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stem_edge.export.checkpoints.hugging_face.config import FULL, SLIDING
from stem_edge.export.checkpoints.hugging_face.rope import read_rope
from stem_edge.export.tensor_files.json import Heads, Layers, one_line
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.ggml.gguf_schema import gguf_name
from stem_edge.layers import Rope
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_frequencies

TABLE, ROPE_FACTORS = "per_layer_token_embd.weight", "rope_freqs.weight"
LAYERS_27B = 62  # llama.cpp scales scores differently in Gemma 3 models with so many layers
LAUREL, SCALE = "blk.0.laurel_l.weight", "blk.0.altup_correct_scale.weight"
LARGE = 1e20  # a channel with a larger factor practically does not rotate
# Llama 3.1 and 3.2 compute RoPE factors from these values; a GGUF file has only the factors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Tensors: TypeAlias = dict[str, Tensor]  # tensors that have not been taken


class Keys(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """Keys of a GGUF file of any architecture, without the prefix "<architecture>."."""

    context_length: int
    embedding_length: int
    block_count: Layers
    feed_forward_length: int | list[int]
    attention__head_count: Heads
    attention__head_count_kv: int | list[int] | None = None
    attention__key_length: int | None = None
    attention__value_length: int | None = None
    attention__layer_norm_rms_epsilon: float
    attention__causal: bool = True
    rope__freq_base: float = 10000.0
    rope__dimension_count: int | None = None
    rope__scale_linear: float = 1.0
    rope__scaling__type: str = "linear"  # llama.cpp's default
    rope__scaling__factor: float | None = None
    rope__scaling__original_context_length: int | None = None
    rope__scaling__attn_factor: float = 1.0
    rope__scaling__yarn_beta_fast: float = 32.0
    rope__scaling__yarn_beta_slow: float = 1.0
    # Keys that only some architectures have.
    attention__sliding_window: int = 0
    attention__sliding_window_pattern: int | list[bool] = 0
    attention__shared_kv_layers: int = 0
    attention__key_length_swa: int | None = None
    attention__value_length_swa: int | None = None
    rope__freq_base_swa: float = 10_000.0
    rope__dimension_count_swa: int | None = None
    final_logit_softcapping: float | None = None
    embedding_length_per_layer_input: int = 0
    altup__num_inputs: int | None = None
    altup__active_idx: int | None = None
    activation_sparsity_scale: float | list[float] = -math.inf

    def __post_init__(self) -> None:
        for name, other, width in (
            ("attention.value_length", self.attention__value_length, self.head_dim),
            ("rope.dimension_count", self.rope__dimension_count, self.head_dim),
            ("attention.value_length_swa", self.attention__value_length_swa, self.window_width),
            ("rope.dimension_count_swa", self.rope__dimension_count_swa, self.window_width),
        ):
            if other not in (None, width):
                raise ValueError(f"{name} is {other}; expected {width}, the width of a head")
        if not self.attention__causal:
            raise ValueError("attention.causal is False; expected a model that writes text")

    @property
    def head_dim(self) -> int:
        """Values per attention head in layers with full attention."""
        return self.attention__key_length or self.embedding_length // self.attention__head_count

    @property
    def window_width(self) -> int:
        """Values per attention head in layers with sliding-window attention."""
        return self.attention__key_length_swa or self.head_dim

    def each(self, given: Any) -> Sequence[Any]:
        """Return `given` as a list with one value per layer. Raises ValueError if its length is wrong."""
        if not isinstance(given, list):
            return [given] * self.block_count
        if len(given) != self.block_count:
            raise ValueError(
                f"{len(given)} values are given for {self.block_count} layers; expected one for each"
            )
        return given

    def rope(self) -> dict[str, Any]:
        """Return config.json's rope_scaling; {} for plain RoPE. Raises ValueError if unsupported."""
        kind, given = self.rope__scaling__type, self.rope__scaling__factor
        factor = (self.rope__scale_linear if given is None else given) or 1.0
        if kind == "yarn":
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            return {
                "rope_type": kind,
                "factor": factor,
                "original_max_position_embeddings": self.rope__scaling__original_context_length,
                "attention_factor": usual * self.rope__scaling__attn_factor,
                "beta_fast": self.rope__scaling__yarn_beta_fast,
                "beta_slow": self.rope__scaling__yarn_beta_slow,
            }
        if self.rope__scaling__attn_factor != 1:
            raise ValueError(
                "rope.scaling.attn_factor is not 1, which the type yarn alone can have"
            )
        if kind not in ("linear", "none"):
            raise ValueError(
                f"rope.scaling.type is {one_line(kind)}; expected none, linear or yarn"
            )
        plain = kind == "none" or factor == 1
        return {} if plain else {"rope_type": "linear", "factor": factor}


def _dense(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    scaling, factors = keys.rope(), tensors.pop(ROPE_FACTORS, None)
    if factors is not None:
        scaling = _llama3(keys, factors, scaling)
    return {
        "head_dim": keys.head_dim,
        "intermediate_size": keys.feed_forward_length,
        "rope_theta": keys.rope__freq_base,
        "rope_scaling": scaling,
        "sliding_window": keys.attention__sliding_window,
    }


def _llama3(keys: Keys, tensor: Tensor, other_scaling: dict[str, Any]) -> dict[str, Any]:
    """Return rope_scaling for Llama 3. Raises ValueError if the file's RoPE differs from Llama 3's.

    tensor: factors of the file. other_scaling: scaling that the file's keys set; must be empty.
    """
    width = keys.head_dim
    if tensor.shape != (width // 2,) or other_scaling:
        raise ValueError(f"{ROPE_FACTORS} {list(tensor.shape)}; expected [{width // 2}] alone")
    factors = whole(tensor)
    given = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    scaling = read_rope(None, given, None, 0)[1]
    expected = frequency_factors(Rope(width, keys.rope__freq_base, scaling))
    if scaling is None or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{ROPE_FACTORS} has factors other than those of Llama 3.1 and 3.2")
    return given


def frequency_factors(rope: Rope) -> F32:
    """Return unscaled / scaled frequencies [head_dim / 2], which may be inf."""
    unscaled, _ = rope_frequencies(msgspec.structs.replace(rope, scaling=None))
    with np.errstate(divide="ignore"):
        return np.asarray(unscaled / rope_frequencies(rope)[0], np.float32)


def _gemma(keys: Keys, tensors: Tensors, pattern: int = 6) -> dict[str, Any]:
    layers, given = keys.block_count, keys.attention__sliding_window_pattern or pattern
    if isinstance(given, int):
        given = [number % given != 0 for number in range(1, layers + 1)]
    sliding = [keys.attention__sliding_window > 0 and one for one in keys.each(given)]
    usual = keys.embedding_length / keys.attention__head_count
    widths = keys.each(keys.feed_forward_length)
    records = _found(tensors, TABLE).shape[0] if keys.embedding_length_per_layer_input else None
    return {
        "head_dim": keys.window_width,
        "intermediate_size": list(widths) if len({*widths}) > 1 else widths[0],
        "layer_types": [SLIDING if one else FULL for one in sliding],
        "sliding_window": keys.attention__sliding_window,
        "rope_parameters": {
            SLIDING: {"rope_theta": keys.rope__freq_base_swa},
            FULL: {"rope_theta": keys.rope__freq_base} | _of_full(keys, tensors),
        },
        "query_pre_attn_scalar": usual if layers == LAYERS_27B else keys.head_dim,
        "final_logit_softcapping": keys.final_logit_softcapping,
        "dtype": "float32",
        # Only Gemma 3n and 4 have these keys.
        "hidden_size_per_layer_input": keys.embedding_length_per_layer_input,
        "vocab_size_per_layer_input": records,
        "num_kv_shared_layers": keys.attention__shared_kv_layers,
    }


def _of_full(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Return config.json's rope_parameters for full attention. Raises ValueError if unsupported."""
    factors, scaling = tensors.pop(ROPE_FACTORS, None), keys.rope()
    if factors is None:
        return scaling
    if scaling:
        raise ValueError(f"both rope.scaling and {ROPE_FACTORS} are given; expected one")
    values = whole(factors)
    turning = int((values == 1).sum())
    fits = factors.shape == (keys.head_dim // 2,) and (values[:turning] == 1).all()
    if not fits or not (values[turning:] > LARGE).all():
        raise ValueError(
            f"{ROPE_FACTORS} {list(factors.shape)} has factors other than Gemma 4's: 1 for the "
            f"first of [{keys.head_dim // 2}], above {LARGE:g} for the others"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(values)}


def _gemma3n(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    scales = keys.each(keys.activation_sparsity_scale)
    if any(map(math.isnan, scales)):
        raise ValueError("activation_sparsity_scale has nan; expected standard deviations")
    return _gemma(keys, tensors, 5) | {
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "altup_num_inputs": keys.altup__num_inputs,
        "altup_active_idx": keys.altup__active_idx,
        "altup_correct_scale": SCALE in tensors,
        "laurel_rank": _found(tensors, LAUREL).shape[0],
    }


def _gemma4(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    said = _gemma(keys, tensors)
    heads = keys.each(keys.attention__head_count_kv or keys.attention__head_count)
    full = [number for number, kind in enumerate(said["layer_types"]) if kind == FULL]
    own = {n: 0 if count == heads[0] else count for n, count in enumerate(heads)}
    lenders = range(len(heads) - keys.attention__shared_kv_layers)
    values = (gguf_name(f"layers.{n}.wv") in tensors for n in full if n in lenders)
    return said | {
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(n): {"num_key_value_heads": count, "head_dim": keys.head_dim if n in full else 0}
            for n, count in own.items()
            if n in full or count
        },
        "attention_k_eq_v": not all(values),
    }


def _found(tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"no tensor {name}")
    return tensors[name]


# Keys that do not change the model: sizes that follow from other keys, and notes of converters.
IGNORED = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "mm.tokens_per_image"}
# Architecture -> model_type in config.json, and the function that describes such a model.
ARCHITECTURES: dict[str, tuple[str, Callable[[Keys, Tensors], dict[str, Any]]]] = {
    "llama": ("mistral", _dense),  # Llama, Mistral, SmolLM and others; RoPE rotates pairs
    "qwen2": ("qwen2", _dense),
    "qwen3": ("qwen3", _dense),
    "gemma3": ("gemma3_text", _gemma),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "gemma4": ("gemma4_text", _gemma4),
}


def described(architecture: str, keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Return the model's config.json as a dict. Raises ValueError for missing or unsupported values."""
    said = {
        "vocab_size": _found(tensors, gguf_name("embedding")).shape[0],
        "hidden_size": keys.embedding_length,
        "num_hidden_layers": keys.block_count,
        "num_attention_heads": keys.attention__head_count,
        "num_key_value_heads": keys.attention__head_count_kv or keys.attention__head_count,
        "max_position_embeddings": keys.context_length,
        "rms_norm_eps": keys.attention__layer_norm_rms_epsilon,
        "tie_word_embeddings": gguf_name("head") not in tensors,
    }
    said |= ARCHITECTURES[architecture][1](keys, tensors)
    return {key: value for key, value in said.items() if value is not None}
