"""The demo's model in the project's own schema."""

from __future__ import annotations

from pathlib import Path

from demo_model import DemoConfig, DemoModel
from stem_format import renamed, save_stem

from stem_edge.config import ModelConfig
from stem_edge.export.tokenizer import convert_tokenizer

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
}


def save_demo(model: DemoModel, out: Path, ranks: Path) -> None:
    """Write the model and the tokenizer that `ranks`, a tiktoken file, holds."""
    tables = {
        f"stem_embeddings.{number}": f"model.layers.{layer}.mlp.stem_table"
        for number, layer in enumerate(model.config.stem_layers)
    }
    tensors = renamed(model.state_dict(), NAMES | tables)
    tokenizer = convert_tokenizer("tiktoken", ranks, add_bos=True)
    save_stem(out, model_config(model.config), tensors, tokenizer)


def model_config(config: DemoConfig) -> ModelConfig:
    return ModelConfig(
        vocab_size=config.vocab_size,
        dim=config.dim,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.dim // config.n_heads,
        d_ff=config.stem_embedding_dim,
        stem_layers=config.stem_layers,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_context=config.max_seqlen,
    )
