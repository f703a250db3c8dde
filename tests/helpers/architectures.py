"""Small models of every kind that the format allows, as checkpoints and quantized bundles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from formats import format_with
from stem_format import save_stem
from torch import Tensor
from torch_engram import END, ENGRAM, GATE_ALONE, WINDOWS, is_engram, stored_engram, with_engram
from torch_model import expert_of_token, random_tables, random_tensors, torch_logits

from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.exporter import export_with
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.graph.formats import BackboneFormat
from stem_edge.layers import BIASED, LinearRope, Llama3Rope, YarnRope
from stem_edge.numerics.quantize import F32
from stem_edge.special import dense_twin

Tensors = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "dim": 48,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 80,
    "stem_layers": (1, 2),
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_context": 64,
}
CPU_ONLY = ("n_experts", "row_window", "ngram_order")
HASHED: dict[str, Any] = {"stem_ffn": "hash-moe", "n_experts": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "stem": {},
    "all layers": {"stem_layers": (0, 1, 2)},
    "the first layer alone": {"stem_layers": (0,)},
    "dense": {"stem_layers": ()},
    "stem-plus": {"stem_ffn": "stem-plus"},
    "stem-mix": {"stem_ffn": "stem-mix"},
    "stem-gate": {"stem_ffn": "stem-gate"},
    "low rank": {"row_rank": 16},
    "low rank, plus": {"row_rank": 32, "stem_ffn": "stem-plus"},
    "low rank, mix": {"row_rank": 16, "stem_ffn": "stem-mix", "biases": ("up",)},
    "means of rows": {"row_window": 4},
    "low rank, mix, means of rows": {"row_window": 3, "row_rank": 16, "stem_ffn": "stem-mix"},
    "mixture of rows": {"row_experts": 3},
    "low rank, gate, mixture": {"row_experts": 2, "row_rank": 16, "stem_ffn": "stem-gate"},
    "plus, means, mixture": {"row_experts": 4, "row_window": 3, "stem_ffn": "stem-plus"},
    "low rank, gate": {"row_rank": 16, "stem_ffn": "stem-gate", "biases": ("up", "down")},
    "Engram": ENGRAM,
    "Engram, a gate alone": GATE_ALONE,
    "Engram and windows": WINDOWS,
    "hash-moe": HASHED,
    "hash-moe, all layers, post norms": {**HASHED, "stem_layers": (0, 1, 2), "post_norms": True},
    "every head has its own keys": {"n_kv_heads": 6},
    "RoPE in halves": {"rope_interleaved": False, "head_dim": 24},
    "RoPE, linear": {"rope_scaling": LinearRope(2.0)},
    "RoPE, llama3": {"rope_scaling": Llama3Rope(8, 1, 4, 16)},
    "RoPE, yarn": {"rope_scaling": YarnRope(4, 16, 1.14), "rope_interleaved": False},
    "window": {"sliding_window": 5},
    "window of itself in one layer": {"sliding_window": 1, "window_layers": (1,)},
    "q and k norm": {"qk_norm_eps": 1e-2},
    "q and k norm, halves": {"qk_norm_eps": 1e-8, "rope_interleaved": False, "head_dim": 16},
    "biases": {"biases": BIASED},
    "q, k, v biases, halves": {"biases": ("wq", "wk", "wv"), "rope_interleaved": False},
    "a bias of q alone": {"biases": ("wq",)},
    "post norms": {"post_norms": True},
    "soft cap": {"logit_softcap": 3.0},
    "soft cap and head bias": {"logit_softcap": 3.0, "biases": ("head",)},
    "tied head": {"tied_head": True},
    "all at once": {
        "stem_ffn": "stem-mix",
        "row_rank": 16,
        "rope_interleaved": False,
        "rope_scaling": YarnRope(2, 16, 1.07, truncate=False),
        "sliding_window": 7,
        "window_layers": (0, 2),
        "qk_norm_eps": 1e-6,
        "biases": BIASED,
        "post_norms": True,
        "logit_softcap": 5.0,
    },
}


def write(
    folder: Path, config: ModelConfig, seed: int = 0, tokens: int = 40
) -> tuple[Path, list[int], F32]:
    """Write a checkpoint of random weights; return it with some ids and their logits [T, V]."""
    tensors, rows = random_tensors(config, seed)
    engram, tables = config.stem_ffn == "engram", random_tables(config, seed)
    kept = [name for name in tensors if not (engram and is_engram(name))]
    stored = {tensor_name(name): tensors[name] for name in kept}
    for layer, table in tables.items():
        at = f"model.layers.{layer}.mlp."
        modules = stored_engram(config, tensors, table) if engram else None
        stored |= modules or rows_as_tensors(config, at, table)
    if config.n_experts:
        stored["model.expert_of_token"] = expert_of_token(config)
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    save_stem(folder, config, stored, tokenizer)
    config = msgspec.structs.replace(config, eos_ids=tokenizer.eos_ids)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()
    if config.row_window:  # documents end in it, one after its first token
        ids[tokens // 3] = ids[2 * tokens // 3] = ids[2 * tokens // 3 + 1] = tokenizer.eos_ids[0]
    if engram:
        ids[tokens // 3] = END
        before = with_engram(config, tensors, tables[config.row_layers[0]], ids)
        logits = torch_logits(dense_twin(config), tensors, {}, ids, before=before)
        return folder, ids, logits.numpy()
    return folder, ids, torch_logits(config, tensors, rows, ids).numpy()


def rows_as_tensors(config: ModelConfig, at: str, table: Tensor) -> Tensors:
    """Name a table's tensors as in the schema."""
    if not config.n_experts:
        return {at + "stem_table.weight": table}
    inner, outer = (math.prod(part) for part in config.row_parts())
    both = table[:, :inner].view(-1, config.d_ff, 2, config.dim)
    down = table[:, inner : inner + outer].view(-1, config.dim, config.d_ff)
    parts = {"gate": both[:, :, 0], "up": both[:, :, 1], "down": down}
    return {f"{at}experts.{name}_proj.weight": part for name, part in parts.items()}


KINDS = [name for name, fields in VARIANTS.items() if fields.keys().isdisjoint(CPU_ONLY)]
Quantized = tuple[dict[str, Any], dict[str, Any]]  # of the model, of the export
ASYMMETRIC = format_with("int4", asymmetric=True, quantizer="gptq")
QUANTIZED: dict[str, Quantized] = {
    "int4": ({}, {"type": format_with("int4"), "rows": "int4"}),
    "int8": ({}, {"type": format_with("int8"), "rows": "int8"}),
    "int4 with zero points": (
        {"dim": 64, "d_ff": 64},
        {"type": ASYMMETRIC, "rows": "fp16"},
    ),
    "int4 with offsets": (
        {"dim": 64, "d_ff": 64},
        {
            "rows": "int8",
            "type": BackboneFormat(
                weights="int4", head="int8", block_size=16, offsets=True, kv_peaks=True
            ),
        },
    ),
    "int8 with zero points": ({}, {"type": format_with("int8", asymmetric=True), "rows": "int8"}),
    # Three blocks in a row: the last zero point fills half a byte.
    "low rank": ({"row_rank": 32}, {"type": ASYMMETRIC, "rows": "int8"}),
    "tied, normed heads": (
        {"tied_head": True, "qk_norm_eps": 1e-5},
        {"type": ASYMMETRIC, "rows": "int4"},
    ),
}


def quantized(folder: Path, name: str) -> tuple[Bundle, list[int]]:
    """Export a bundle with a quantized backbone; return it with some ids."""
    fields, options = QUANTIZED[name]
    path, ids, _ = write(folder / "checkpoint", ModelConfig(**(SIZES | fields)))
    out = folder / "bundle"
    return export_with(path, out, Recipe(prefill_graph=False, **options)), ids
