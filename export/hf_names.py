"""Hugging Face's names of a decoder's tensors, and this project's."""

from __future__ import annotations

from collections.abc import Iterable

TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",  # before the FFN: the name counts from the other side
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "project": "mlp.stem_project",
    "ffn_post_norm": "post_mlp_layernorm",
}


def tensor_name(name: str) -> str:
    """Hugging Face's name of a tensor of ModelConfig.backbone_shapes()."""
    matrix = name.removesuffix(".bias")
    ending = ".weight" if matrix == name else ".bias"
    if matrix in TOP:
        return TOP[matrix] + ending
    _, layer, part = matrix.split(".")
    return f"model.layers.{layer}.{LAYER[part]}{ending}"


def module_names(names: Iterable[str]) -> dict[str, str]:
    """Hugging Face's name of a module -> this project's name of its weight."""
    weights = [name for name in names if not name.endswith(".bias")]
    return {tensor_name(name).removesuffix(".weight"): name for name in weights}
