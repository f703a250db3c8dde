"""GGUF files as llama.cpp's own converter writes them, by its package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stem_edge.export.tokenizers.gguf import NORMAL, UNUSED
from stem_edge.numerics.quantize import F32, U8


def write_file(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a file; a tensor is an array of floats, or (codes of its rows, name of their type)."""
    writer = gguf.GGUFWriter(path, str(keys.get("general.architecture", "llama")))
    for key, value in keys.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            codes, kind = tensor
            writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    kinds |= {list: "array", tuple: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def model_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a model of transformers."""
    kind = "llama" if config.model_type == "mistral" else config.model_type
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        values |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
        values["rope.dimension_count"] = config.head_dim
    return {"general.architecture": kind} | {f"{kind}.{key}": v for key, v in values.items()}


def model_tensors(model: Any) -> dict[str, F32]:
    """Return the tensors of a model of transformers, by their names and in the order of GGUF."""
    config = model.config
    arch = gguf.MODEL_ARCH.LLAMA if config.model_type in ("llama", "mistral") else None
    found: dict[str, F32] = {}
    names = gguf.get_tensor_name_map(
        arch or gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if arch and part in heads:
            values = _pairs(values, heads[part])
        found[str(names.get_name(name, (".weight", ".bias")))] = values
    return found


def _pairs(values: F32, heads: int) -> F32:
    """Put the rows of heads that rotate halves into the order in which they rotate pairs."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def byte_keys(size: int) -> dict[str, Any]:
    """Return the keys of a tokenizer of single bytes, one pair of them, and unused tokens."""
    chars = byte_chars()
    names = [*chars, chars[97] + chars[98], *(f"[PAD{n}]" for n in range(257, size))]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": names,
        "merges": [f"{chars[97]} {chars[98]}"],
    }
    keys["token_type"] = [NORMAL] * 257 + [UNUSED] * (size - 257)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_chars() -> list[str]:
    """List the characters that stand for bytes in byte-level vocabularies."""
    return [char for _, char in sorted(bytes_to_unicode().items())]


def write_model(
    path: Path,
    model: Any,
    types: Mapping[str, str] | str = "F32",
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of transformers.

    types: a type that gguf can quantize to, or for what names of matrices begin with, the first that fits.
    """
    parts = {"": types} if isinstance(types, str) else types
    tensors: dict[str, Any] = dict(model_tensors(model))
    for name, values in list(tensors.items()):
        type = next((type for part, type in parts.items() if name.startswith(part)), "F32")
        if values.ndim == 2 and type != "F32":
            tensors[name] = coded(values, type), type
    size = model.config.vocab_size
    tokens = byte_keys(size) if size > 256 else {}
    return write_file(path, model_keys(model.config) | tokens | dict(more or {}), tensors)


def coded(values: F32, type: str) -> U8:
    """Quantize a matrix by numpy."""
    return cast(U8, gguf.quants.quantize(values, gguf.GGMLQuantizationType[type]))
