"""Translates between Hugging Face's tensor names and those of ModelConfig.backbone_shapes()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

TOP = {"embedding": "embed_tokens", "norm": "norm"}
HEAD_NAME, HEAD = "head", "lm_head"
LAYER = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",  # the norm before the FFN, in spite of its name
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "project": "mlp.stem_project",
    "mix": "mlp.stem_mix",
    "router": "mlp.stem_router",
    "ffn_post_norm": "post_mlp_layernorm",
}


class Names(NamedTuple):
    """Our module names -> Hugging Face's. layer: modules of a layer. top: all others. inside: prefix."""

    top: Mapping[str, str]
    layer: Mapping[str, str]
    inside: str = "model."


NAMES = Names(TOP, LAYER)


def tensor_name(name: str, names: Names = NAMES) -> str:
    """Return Hugging Face's name of the backbone tensor `name` (ModelConfig.backbone_shapes)."""
    matrix = name.removesuffix(".bias")
    ending = ".weight" if matrix == name else ".bias"
    if matrix == HEAD_NAME:
        return HEAD + ending
    if matrix in names.top:
        return names.inside + names.top[matrix] + ending
    _, layer, part = matrix.split(".")
    return f"{names.inside}layers.{layer}.{names.layer[part]}{ending}"


def module_names(tensors: Iterable[str], names: Names = NAMES) -> dict[str, str]:
    """Return Hugging Face's module name -> this project's name of the module's weight."""
    known = {HEAD_NAME, *names.top, *names.layer}
    weights = [name for name in tensors if name.rpartition(".")[2] in known]
    return {tensor_name(name, names).removesuffix(".weight"): name for name in weights}
