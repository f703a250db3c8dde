"""Descriptions of small models."""

from __future__ import annotations

from typing import Any

from stem_edge.config import ModelConfig


def config(**changes: Any) -> ModelConfig:
    """Describe a small model, with other values of some fields."""
    fields: dict[str, Any] = {
        "vocab_size": 10,
        "dim": 4,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 2,
        "d_ff": 6,
        "stem_layers": (1,),
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_context": 16,
    }
    return ModelConfig(**{**fields, **changes})
