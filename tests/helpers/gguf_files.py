"""GGUF files as llama.cpp's own converter writes them, by its package gguf."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stem_edge.export.tokenizers.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
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
    if config.model_type.startswith("gemma"):
        return gemma_keys(config)
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


def gemma_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a text model of Gemma, as llama.cpp's converter writes them."""
    kind, ropes = config.model_type.removesuffix("_text"), config.rope_parameters
    sliding = [one == "sliding_attention" for one in config.layer_types]
    layers = [config.per_layer_config[n] for n in range(len(sliding))] if kind == "gemma4" else []
    full = _of_full(config)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers]
        or config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }
    if ropes["full_attention"]["rope_type"] == "linear":
        factor = float(ropes["full_attention"]["factor"])
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if kind != "gemma3":
        keys["attention.sliding_window_pattern"] = sliding
        keys["attention.shared_kv_layers"] = config.num_kv_shared_layers
        keys["embedding_length_per_layer_input"] = config.hidden_size_per_layer_input or 0
    if kind == "gemma3n":
        shares = config.activation_sparsity_pattern
        keys["altup.active_idx"] = config.altup_active_idx
        keys["altup.num_inputs"] = config.altup_num_inputs
        keys["activation_sparsity_scale"] = [
            NormalDist().inv_cdf(share) if share else -math.inf for share in shares
        ]
    if kind == "gemma4":
        swa = layers[sliding.index(True)].head_dim
        keys["attention.key_length_swa"] = keys["attention.value_length_swa"] = swa
        keys |= {"rope.dimension_count": full, "rope.dimension_count_swa": swa}
        if config.use_double_wide_mlp:
            own = config.num_hidden_layers - config.num_kv_shared_layers
            keys["feed_forward_length"] = [
                config.intermediate_size * (1 if layer < own else 2)
                for layer in range(config.num_hidden_layers)
            ]
    return {"general.architecture": kind} | {f"{kind}.{key}": v for key, v in keys.items()}


def _of_full(config: Any) -> int:
    """Return the width of heads in layers with full attention."""
    layer = config.layer_types.index("full_attention")
    own = config.per_layer_config[layer] if config.model_type == "gemma4_text" else config
    return int(own.head_dim)


def gemma_tensors(config: Any, state: Mapping[str, Any]) -> dict[str, F32]:
    """Return the tensors of a text model of Gemma, by their names in GGUF."""
    kind = config.model_type.removesuffix("_text")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    found: dict[str, F32] = {}
    stacks: dict[str, list[F32]] = {}
    for name, tensor in state.items():
        values = tensor.float().numpy() + np.float32(
            kind == "gemma3" and name.endswith("norm.weight")
        )
        stack = re.fullmatch(r"(model\.altup_\w+)\.\d\.weight", name)
        if stack:
            stacks.setdefault(stack[1] + ".weight", []).append(values)
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            plain = name if name.endswith(".weight") else name + ".weight"
            found[str(names.get_name(plain, (".weight",)))] = values
    found |= {str(names.get_name(n, (".weight",))): np.stack(v) for n, v in stacks.items()}
    if kind == "gemma4":
        width, rope = _of_full(config), config.rope_parameters["full_attention"]
        turning = int(width * rope.get("partial_rotary_factor", 1.0) / 2)
        factors = np.where(np.arange(width // 2) < turning, 1.0, 1e30)
        found["rope_freqs.weight"] = factors.astype(np.float32)
    return found


def model_tensors(model: Any) -> dict[str, F32]:
    """Return the tensors of a model of transformers, by their names and in the order of GGUF."""
    config = model.config
    if config.model_type.startswith("gemma"):
        return gemma_tensors(config, model.state_dict())
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


# Types that numpy quantizes nothing to -> bytes of float16 in their blocks: scales, and offsets.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"IQ4_NL": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2)}


def coded(values: F32, type: str) -> U8:
    """Quantize a matrix by numpy; to types for which that is not written, random codes."""
    try:
        return cast(U8, gguf.quants.quantize(values, gguf.GGMLQuantizationType[type]))
    except NotImplementedError:
        return random_blocks(type, values.shape, 1e-3)


def random_blocks(type: str, shape: tuple[int, ...], scale: float = 1.0) -> U8:
    """Return rows of random codes with scales, and offsets, that a block may have."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    rows = (shape[0], shape[1] // block, nbytes)
    blocks = np.random.default_rng(3).integers(256, size=rows, dtype=np.uint8)
    for at in HALVES[type]:
        blocks[..., at : at + 2] = np.full((*rows[:2], 1), scale, "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def tokenizer_keys(path: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """Return the keys of a tokenizer.json whose model is BPE, as llama.cpp's converter writes them.

    pre: name of its pattern, if it is byte-level.
    """
    converted = convert_tokenizer("json", path, add_bos=None)
    parsed = json.loads(converted.json)
    model, added = parsed["model"], {t["content"]: t["special"] for t in parsed["added_tokens"]}
    ids = model["vocab"] | {token["content"]: token["id"] for token in parsed["added_tokens"]}
    names = sorted(ids, key=lambda name: int(ids[name]))
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    ranks = {a + b: rank for rank, (a, b) in reversed(list(enumerate(merges)))}

    def kind(name: str) -> int:
        if name in added:
            return CONTROL if added[name] else USER_DEFINED
        byte = model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", name)
        return UNKNOWN if name == model.get("unk_token") else BYTE if byte else NORMAL

    keys: dict[str, Any] = {
        "model": "llama" if model.get("byte_fallback") else "gpt2",
        "pre": pre,
        "tokens": names,
        "token_type": [kind(name) for name in names],
        "merges": [" ".join(pair) for pair in merges],
        "scores": [-float(ranks.get(name, len(merges))) for name in names],
        "add_bos_token": bool(converted.config.get("add_bos_token")),
    }
    keys |= dict(zip(("eos_token_id", "eot_token_id"), converted.eos_ids, strict=False))
    keys |= {} if converted.bos_id is None else {"bos_token_id": converted.bos_id}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def gemma_tokens(folder: Path, kind: str) -> dict[str, Any]:
    """Return the keys of a folder's tokenizer as llama.cpp's converter writes those of Gemma.

    kind: "llama" up to Gemma 3n, then "gemma4".
    """
    at = "tokenizer.ggml."
    keys = tokenizer_keys(folder / "tokenizer.json") | {at + "model": kind}
    if kind == "gemma4":
        del keys[at + "scores"]
        return keys
    del keys[at + "merges"]
    keys[at + "add_space_prefix"] = False
    names = zip(keys[at + "tokens"], keys[at + "token_type"], strict=True)
    runs = [name.replace("\u2581", " ") if t == USER_DEFINED else name for name, t in names]
    return keys | {at + "tokens": runs}
