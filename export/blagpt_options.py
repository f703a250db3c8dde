"""`model_config` of BlaGPT's trainer: which models it describes that can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from stem_edge.config import MAX_LAYERS, ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.settings import check_options

EPS = 1e-8  # of all its norms
SPANS = {"1/3": 3, "1/2": 2, "full": 1}  # stem_ratio -> the last of so many layers has a table
BIASED = ("wq", "wk", "wv", "wo", "gate", "up", "down")

EXPECTED: dict[str, tuple[object, ...]] = {
    "attention": ("regular",),
    "norm_layer": ("rmsnorm",),
    "activation": ("swiglu",),
    "pos_encoding": ("rotary",),
    "rope_variant": ("standard",),
    "n_predict": (1,),
}
NEEDED = ("attention", "norm_layer", "activation", "pos_encoding")  # older than the others
# These train, or belong to parts of which others say that they are off.
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
    """The part of `model_config` that describes the model; an option younger than it is off."""

    vocab_size: int
    n_layer: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]  # it sizes lists before ModelConfig
    n_head: Annotated[int, msgspec.Meta(ge=1)]
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
        """Layers with a table: as listed, else by the ratio, never the first."""
        if not self.use_stem:
            return ()
        span = SPANS.get(self.stem_ratio or "", self.n_layer + 1)
        ratio = range(span - 1, self.n_layer, span)
        return tuple(n for n in range(1, self.n_layer) if n in (self.stem_layers or ratio))


def read_options(path: Path, options: dict[str, Any]) -> Options:
    """`model_config` of the file `path`, if all of it is supported."""
    check_options(
        path,
        dict.fromkeys(NEEDED) | options,
        expected=EXPECTED,
        ignored=IGNORED.union(Options.__struct_fields__),
        advice="such a model cannot be exported",
    )
    try:
        return msgspec.convert(options, Options)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: model_config: {error}") from error


def model_config(path: Path, options: Options) -> ModelConfig:
    """The model that the options describe."""
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
