"""Reads checkpoints of BlaGPT's trainer: state_step*.pt and best_model*.pt.

Such a file holds the model's options and tensors, and the trainer's source code, which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.checkpoint import (
    Checkpoint,
    TokenizerSource,
    check_shapes,
    module_names,
    same_values,
)
from stem_edge.export.checkpoints.head_padding import order_heads
from stem_edge.export.tensor_files.json import Heads, Layers, one_line, read_options
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.export.tensor_files.torch import load_tensors, named_tensors

STATES = ("best_model*.pt", "state_step*.pt")  # later patterns are preferred

TOP_NAMES = {"transformer.wte": "embedding", "transformer.ln_f": "norm", "lm_head": "head"}
LAYER_NAMES = {
    "ln_1": "attention_norm",
    "ln_2": "ffn_norm",
    "ln_3": "attention_post_norm",
    "ln_4": "ffn_post_norm",
    "attn.q_proj": "wq",
    "attn.q_norm": "q_norm",
    "attn.k_norm": "k_norm",
    "attn.c_proj": "wo",
    "mlp.c_gate": "gate",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
    "attn.kv_proj": "wkv",
    "mlp.stem_embedding": "table",
}
FUSED, TABLE = "wkv", "table"
TURNED = ("wq", "wk", "q_norm", "k_norm")  # their rows are in the order of RoPE

EPS = 1e-8  # of all norms
SPANS = {"1/3": 3, "1/2": 2, "full": 1}  # stem_ratio -> n: every n-th layer has a table
BIASED = ("wq", "wk", "wv", "wo", "gate", "up", "down")

EXPECTED: dict[str, tuple[object, ...]] = {
    "attention": ("regular",),
    "norm_layer": ("rmsnorm",),
    "activation": ("swiglu",),
    "pos_encoding": ("rotary",),
    "rope_variant": ("standard",),
    "n_predict": (1,),
}
# Every file has these options, unlike newer ones, so a missing option is an error.
NEEDED = ("attention", "norm_layer", "activation", "pos_encoding")
# Options of training, or of features that another option turns off.
IGNORED = {
    *("dropout", "z_loss_weight", "zero_init_proj_layers", "optimizer_name", "optimizer_args"),
    *("top_window_size", "top_loss_weight", "top_force_optimized", "share_prediction_heads"),
    *("n_latentd", "polycom_order", "per_layer_token_emb_dim", "param_token_num"),
    *("engram_variant", "engram_ngram", "engram_vocab_mult", "engram_share_embedding"),
    *("kda_chunk_size", "kda_use_short_conv", "kda_decay_rank"),
    *("kda_interleave_with", "kda_interleave_ratio", "segment_sizes", "dilation_rates"),
    *("weight_sharing_pattern", "weight_sharing_groups"),
}


class Options(msgspec.Struct):
    """Options in `model_config` that describe the model. An option that is missing is off."""

    vocab_size: int
    n_layer: Layers
    n_head: Heads
    n_embd: int
    block_size: int
    n_kv_head: int | None = None
    bias: bool = False
    use_qkv_bias: bool = False
    tie_embed_weights: bool = False
    rmsnorm_before_qk: bool = False
    use_pre_post_norm: bool = False
    rope_theta: float = 10000.0
    use_stem: bool = False
    stem_ratio: str | None = None
    stem_layers: list[int] = []
    use_top: bool = False

    def stem(self) -> tuple[int, ...]:
        """Return the layers with a table: stem_layers if set, else by stem_ratio. Layer 0 never has one."""
        if not self.use_stem:
            return ()
        span = SPANS.get(self.stem_ratio or "", self.n_layer + 1)
        ratio = range(span - 1, self.n_layer, span)
        return tuple(n for n in range(1, self.n_layer) if n in (self.stem_layers or ratio))


def find_states(path: Path) -> list[Path]:
    """List the state files in a folder, or [path] for a file. The last one is exported."""
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    return [p for glob in STATES for p in sorted(path.glob(glob)) if p.is_file()]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a state file of BlaGPT's trainer, or the last one of a folder. Raises CheckpointError."""
    states = find_states(Path(path))
    file, others = states[-1], ", ".join(state.name for state in states[:-1])
    config, tensors = _read_state(file)
    backbone, tables = _convert(config, tensors)
    checkpoint = Checkpoint(
        path=file,
        config=config,
        backbone=backbone,
        tables=tables,
        tokenizer=TokenizerSource("json", file.with_name("tokenizer.json"), add_bos=False),
        notes=(f"{file.name} of {len(states)} states, not {one_line(others)}",) if others else (),
    )
    return check_shapes(checkpoint)


def _read_state(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    state = load_tensors(path)
    described, saved = state.get("model_config"), state.get("model")
    if not isinstance(described, dict) or not isinstance(saved, dict):
        raise CheckpointError(
            f"{path}: found {one_line(', '.join(map(str, state)))}; expected 'model_config' and "
            "'model', as BlaGPT's trainer saves them: give one of its state_step*.pt"
        )
    options = read_options(
        path,
        dict.fromkeys(NEEDED) | described,
        Options,
        expected=EXPECTED,
        ignored=IGNORED,
        advice="such a model cannot be exported",
    )
    tensors = named_tensors(path, saved)
    if options.use_top:
        tensors.pop("top_head.weight", None)  # not needed: only training uses its predictions
    head, embedding = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
    if options.tie_embed_weights and head is not None and embedding is not None:
        if head.dtype != embedding.dtype or not same_values(head, embedding):
            raise CheckpointError(
                f"{path}: tie_embed_weights is True, but lm_head.weight is not transformer.wte.weight; "
                "expected them to be equal: one of them was changed after training"
            )
        del tensors["lm_head.weight"]
    return _model_config(path, options), tensors


def _convert(
    config: ModelConfig, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Return backbone tensors (unknown names unchanged), and index of a STEM layer -> its table."""
    backbone: dict[str, Tensor] = {}
    tables: dict[int, Tensor] = {}
    names = module_names("transformer.h.{}.", config.n_layers, TOP_NAMES, LAYER_NAMES)
    # The trainer rotates (a, b) by the negative angle. That is (b, a) rotated by the positive angle.
    swapped = np.arange(config.head_dim).reshape(2, -1)[::-1].ravel()
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        known = names.get(module, module)
        end = "" if kind == "weight" else f".{kind}"
        at, _, part = known.rpartition(".")
        if module not in names:
            backbone[name] = tensor
        elif part == TABLE and not end:
            tables[int(at.removeprefix("layers."))] = tensor
        elif part == FUSED:
            split = config.n_kv_heads * config.head_dim
            backbone[f"{at}.wk{end}"] = order_heads(tensor.part(0, split), swapped)
            backbone[f"{at}.wv{end}"] = tensor.part(split, tensor.shape[0])
        else:
            turned = part in TURNED
            backbone[known + end] = order_heads(tensor, swapped) if turned else tensor
    return backbone, tables


def _model_config(path: Path, options: Options) -> ModelConfig:
    qkv = BIASED[:3] if options.use_qkv_bias else ()
    try:
        return ModelConfig(
            vocab_size=options.vocab_size,
            dim=options.n_embd,
            n_layers=options.n_layer,
            n_heads=options.n_head,
            n_kv_heads=options.n_kv_head or options.n_head,
            head_dim=options.n_embd // options.n_head,
            d_ff=4 * options.n_embd,
            stem_layers=options.stem(),
            norm_eps=EPS,
            rope_theta=options.rope_theta,
            max_context=options.block_size,
            tied_head=options.tie_embed_weights,
            rope_interleaved=False,
            qk_norm_eps=EPS if options.rmsnorm_before_qk else None,
            post_norms=options.use_pre_post_norm,
            biases=BIASED if options.bias else qkv,
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: model_config: {error}") from error
