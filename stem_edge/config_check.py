"""Checks of a model description: sizes out of range, and fields that contradict each other."""

from __future__ import annotations

from typing import get_args

from stem_edge.description import Description
from stem_edge.layers import BIASED, FFN_TERMS, Activation, Layer
from stem_edge.limits import (
    LEAST_SCALING,
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_KINDS,
    MAX_LAYERS,
    MAX_ROW_EXPERTS,
    MAX_ROW_WINDOW,
    MAX_SOFTCAP,
    MAX_THETA,
    MAX_VOCAB,
    MAX_WIDTH,
)

RANGES = {
    "vocab_size": (1, MAX_VOCAB),
    "n_layers": (1, MAX_LAYERS),
    "max_context": (1, MAX_CONTEXT),
    **dict.fromkeys(("dim", "head_dim", "d_ff"), (1, MAX_WIDTH)),
    **dict.fromkeys(("n_heads", "n_kv_heads"), (1, MAX_HEADS)),
    "sliding_window": (0, MAX_CONTEXT),
    "embedding_scale": (LEAST_SCALING, MAX_WIDTH),
    "ple_scale": (LEAST_SCALING, MAX_WIDTH),
    "attention_scale": (0, MAX_WIDTH),
    "laurel_rank": (0, MAX_WIDTH),
}


def check_config(config: Description) -> None:
    """Raise ValueError for a field out of range, and for fields that contradict each other."""
    for field, (least, most) in RANGES.items():
        if not least <= (value := getattr(config, field)) <= most:
            raise ValueError(f"{field} is {value}; expected {least} to {most}")
    _check_layers(config, "stem_layers", config.stem_layers)
    _check_layers(config, "window_layers", config.window_layers or ())
    # Limited, because each layer searches all kinds, and each RoPE has tables for the whole context.
    for name in ("layer_kinds", "placeholders"):
        if (count := len(getattr(config, name))) > MAX_KINDS:
            raise ValueError(f"{count} {name}; expected at most {MAX_KINDS}")
    for kind in config.layer_kinds:
        _check_layers(config, "layers of layer_kinds", kind.layers)
        if kind.d_ff and config.stem_ffn != "ple" and set(kind.layers) & set(config.stem_layers):
            raise ValueError(f"d_ff {kind.d_ff} of layers {kind.layers}: rows have one width")
    if not 0 <= config.borrowed_kv_layers < config.n_layers:
        raise ValueError(
            f"borrowed_kv_layers is {config.borrowed_kv_layers} of {config.n_layers} layers"
        )
    for layer in config.layers:
        _check_layer(config, layer)
    _check_rows(config)
    _check_extras(config)
    if config.streams != 1 or config.active_stream or config.ple_gate_scale:
        from stem_edge.special import check_altup  # for such models alone

        check_altup(config)
    first = () if config.bos_id is None else (config.bos_id,)
    for token in (*config.eos_ids, *config.placeholders.values(), *first):
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"special token id {token} is outside the vocab_size {config.vocab_size}"
            )


def _check_layer(config: Description, layer: Layer) -> None:
    if not (layer.head_dim > 0 and 0 < layer.d_ff <= MAX_WIDTH and layer.n_kv_heads > 0):
        raise ValueError(f"layer_kinds has a size out of range: {layer}")
    if config.n_heads % layer.n_kv_heads:
        raise ValueError(
            f"n_heads {config.n_heads} is not a multiple of n_kv_heads {layer.n_kv_heads}"
        )
    if config.n_heads * layer.head_dim > MAX_WIDTH:
        raise ValueError(
            f"n_heads {config.n_heads} times head_dim {layer.head_dim} is above {MAX_WIDTH}"
        )
    if not 0 <= layer.sparsity < 1:
        raise ValueError(f"sparsity is {layer.sparsity}; expected 0 to below 1")
    if layer.head_dim % 2:
        raise ValueError(f"head_dim {layer.head_dim} is odd; RoPE rotates pairs")
    if not (0 < config.norm_eps < 1 and 1 < layer.rope.theta <= MAX_THETA):
        raise ValueError(
            f"norm_eps {config.norm_eps} or rope_theta {layer.rope.theta} is out of range; "
            f"expected 0 to 1 and 1 to {MAX_THETA:g}"
        )
    if layer.rope.scaling is not None:
        from stem_edge.special import check_scaling  # for such models alone

        check_scaling(layer.rope.scaling)


def _check_layers(config: Description, field: str, layers: tuple[int, ...]) -> None:
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{field} {layers} is not ascending without repeats")
    if layers and not 0 <= layers[0] <= layers[-1] < config.n_layers:
        raise ValueError(f"{field} {layers} is outside the {config.n_layers} layers")


def _check_rows(config: Description) -> None:
    known = [kind for kind in FFN_TERMS if kind != "dense"]
    if config.stem_ffn not in known:
        raise ValueError(f"stem_ffn is {config.stem_ffn!r}; expected one of {', '.join(known)}")
    if config.row_window and config.borrowed_kv_layers:
        raise ValueError("row_window in a model whose last layers borrow keys and values")
    hashed, ngrams = config.stem_ffn == "hash-moe", config.stem_ffn in ("ngrams", "engram")
    ple, model = config.stem_ffn == "ple", f"stem_ffn {config.stem_ffn}"
    if hashed != (config.n_experts > 0) or not 0 <= config.n_experts <= config.vocab_size:
        raise ValueError(
            f"n_experts is {config.n_experts} with {model}; expected 1 to {config.vocab_size} for "
            "hash-moe, 0 for others"
        )
    widest = MAX_WIDTH if ngrams else config.d_ff
    if not 0 <= config.row_rank <= widest or (config.row_rank and (hashed or ple)):
        raise ValueError(
            f"row_rank is {config.row_rank} with {model}; expected 0 to {widest}, and 0 for hash-moe "
            "and ple"
        )
    summed = config.stem_layers and not (hashed or ple or ngrams)
    for field, most in (("row_window", MAX_ROW_WINDOW), ("row_experts", MAX_ROW_EXPERTS)):
        if (value := getattr(config, field)) and not (summed and 1 < value <= most):
            raise ValueError(
                f"{field} is {value} with {model} and {len(config.stem_layers)} STEM layers; expected "
                f"2 to {most}, and 0 for hash-moe, ple, ngrams and dense models"
            )
    _check_ple(config)
    told = (config.ngram_sizes, config.ngram_multipliers, config.ngram_filler, config.engram_kernel)
    if ngrams or config.ngram_order or config.ngram_end is not None or any(told):
        from stem_edge.special import check_ngrams  # for such models alone

        check_ngrams(config)


def _check_ple(config: Description) -> None:
    ple, model = config.stem_ffn == "ple", f"stem_ffn {config.stem_ffn}"
    if ple != (0 < config.ple_width <= MAX_WIDTH) or not ple >= (config.ple_records > 0):
        raise ValueError(
            f"ple_width is {config.ple_width} and ple_records {config.ple_records} with {model}; "
            f"expected a width of 1 to {MAX_WIDTH} for ple, 0 and 0 for others"
        )
    if ple and len(config.stem_layers) != config.n_layers:
        raise ValueError(
            f"stem_layers is {config.stem_layers} with {model}; expected all {config.n_layers} layers"
        )
    if not 0 <= config.ple_records <= config.vocab_size:
        raise ValueError(f"ple_records is {config.ple_records} of {config.vocab_size} tokens")


def _check_extras(config: Description) -> None:
    unknown = [name for name in config.biases if name not in BIASED]
    if unknown or len(set(config.biases)) < len(config.biases):
        raise ValueError(f"biases {config.biases}; expected some of {', '.join(BIASED)}, once each")
    if "head" in config.biases and config.tied_head:
        raise ValueError("a head that is tied to the embedding cannot have a bias")
    if config.logit_softcap and not LEAST_SCALING <= config.logit_softcap <= MAX_SOFTCAP:
        raise ValueError(
            f"logit_softcap is {config.logit_softcap}; expected 0, or {LEAST_SCALING:g} to "
            f"{MAX_SOFTCAP:g}"
        )
    if config.qk_norm_eps is not None and not 0 <= config.qk_norm_eps < 1:
        raise ValueError(f"qk_norm_eps is {config.qk_norm_eps}; expected 0 to 1")
    if config.activation not in get_args(Activation):
        raise ValueError(f"activation is {config.activation!r}; expected silu or gelu")
    if config.v_norm and config.qk_norm_eps is None:
        raise ValueError("v_norm needs the epsilon of qk_norm_eps")
