"""Small models with torch's logits, as checkpoints and quantized bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
from formats import format_with
from stem_format import save_stem
from torch import Tensor
from torch_model import expert_of_token, random_tables, random_tensors, torch_logits

from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.exporter import export_with
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.graph.formats import BackboneFormat
from stem_edge.layers import BIASED
from stem_edge.numerics.quantize import F32

Tensors = dict[str, Tensor]
SIZES = models.SIZES | {"max_context": 64}
HASHED: dict[str, Any] = {"stem_ffn": "hash-moe", "n_experts": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "stem": {},
    "dense": {"stem_layers": ()},
    "stem-plus": {"stem_ffn": "stem-plus"},
    "stem-mix": {"stem_ffn": "stem-mix"},
    "stem-gate": {"stem_ffn": "stem-gate"},
    "low rank": {"row_rank": 16},
    "mixture of rows": {"row_experts": 3},
    "hash-moe": HASHED,
    "q and k norm, halves": {"qk_norm_eps": 1e-8, "rope_interleaved": False, "head_dim": 16},
    "biases": {"biases": BIASED},
    "post norms": {"post_norms": True},
    "tied head": {"tied_head": True},
    **{name: models.STEM[name] for name in ("gate", "windows")},
}


def write(
    folder: Path, config: ModelConfig, seed: int = 0, tokens: int = 40
) -> tuple[Path, list[int], F32]:
    """Write a checkpoint of random weights; return it with some ids and their logits [T, V]."""
    tensors, rows = random_tensors(config, seed)
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    save_stem(folder, config, schema_tensors(config, seed), tokenizer)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()
    return folder, ids, torch_logits(config, tensors, rows, ids).numpy()


def schema_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """Random tensors by the names of this project's schema."""
    found = {tensor_name(name): t for name, t in random_tensors(config, seed)[0].items()}
    for layer, table in random_tables(config, seed).items():
        mlp = f"model.layers.{layer}.mlp."
        if not config.n_experts:
            found[mlp + "stem_table.weight"] = table
            continue
        size = config.d_ff * config.dim
        pairs = table[:, : 2 * size].view(-1, config.d_ff, 2, config.dim)
        down = table[:, 2 * size :].view(-1, config.dim, config.d_ff)
        parts = {"gate": pairs[:, :, 0], "up": pairs[:, :, 1], "down": down}
        found |= {f"{mlp}experts.{name}_proj.weight": part for name, part in parts.items()}
    if config.n_experts:
        found["model.expert_of_token"] = expert_of_token(config)
    return found


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
