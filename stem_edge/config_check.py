"""Contradictions in a model description."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from stem_edge.description import Description
from stem_edge.layers import (
    BIASED,
    FFN_TERMS,
    Activation,
    Layer,
    Llama3Rope,
    ProportionalRope,
    RopeScaling,
)
from stem_edge.limits import (
    LARGEST,
    LEAST_SCALING,
    LEAST_STEP,
    MAX_CONTEXT,
    MAX_FACTOR,
    MAX_KERNEL,
    MAX_KINDS,
    MAX_LAYERS,
    MAX_MIXED,
    MAX_ORDER,
    MAX_RECORDS,
    MAX_ROW_EXPERTS,
    MAX_ROW_WINDOW,
    MAX_SOFTCAP,
    MAX_STREAMS,
    MAX_THETA,
    MAX_WIDTH,
)


def check_config(config: Description) -> None:
    """Raise ValueError if the numbers of a description contradict each other."""
    for field, largest in LARGEST.items():
        if not 0 < (value := getattr(config, field)) <= largest:
            raise ValueError(f"{field} is {value}; expected 1 to {largest}")
    _check_layers(config, "stem_layers", config.stem_layers)
    _check_layers(config, "window_layers", config.window_layers or ())
    # Each layer looks through all of these, and each rotation has tables for the whole context.
    for name, count in (
        ("layer_kinds", len(config.layer_kinds)),
        ("placeholders", len(config.placeholders)),
    ):
        if count > MAX_KINDS:
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
    _check_altup(config)
    special = (*config.eos_ids, *config.placeholders.values())
    for token in (*special, *([] if config.bos_id is None else [config.bos_id])):
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
        _check_scaling(layer.rope.scaling)


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
        _check_ngrams(config)


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


def _check_ngrams(config: Description) -> None:
    model, engram = f"stem_ffn {config.stem_ffn}", config.stem_ffn == "engram"
    if config.stem_ffn not in ("ngrams", "engram"):
        raise ValueError(f"n-grams with {model}; expected ngrams or engram as stem_ffn")
    if not engram and (config.ngram_multipliers or config.ngram_filler or config.engram_kernel):
        raise ValueError(
            f"ngram_multipliers, ngram_filler or engram_kernel with {model}; expected engram as stem_ffn"
        )
    order, sizes, end = config.ngram_order, config.ngram_sizes, config.ngram_end
    each = (order - 1) * max(1, len(config.stem_layers))
    if not 2 <= order <= MAX_ORDER or not sizes or len(sizes) % each:
        raise ValueError(
            f"ngram_order is {order} with {len(sizes)} ngram_sizes; expected 2 to {MAX_ORDER} and as "
            "many sizes for each of 2 to ngram_order ids, in each layer with rows"
        )
    if min(sizes) < 1 or sum(sizes) > MAX_RECORDS or len(sizes) > MAX_LAYERS:
        raise ValueError(
            f"{len(sizes)} ngram_sizes of {sum(sizes)} rows; expected at most {MAX_LAYERS} of "
            f"{MAX_RECORDS}, each at least 1"
        )
    if not 0 <= (end or 0) < config.vocab_size:
        raise ValueError(f"ngram_end is {end}; expected 0 to {config.vocab_size - 1}")
    known = bool(config.stem_layers) if engram else config.stem_layers == (0,)
    if not known or not config.row_rank or config.streams > 1:
        raise ValueError(
            f"stem_layers {config.stem_layers}, row_rank {config.row_rank} and {config.streams} "
            f"streams with {model}; expected {'some layers' if engram else '(0,)'}, the values of a row, "
            "and 1 stream"
        )
    if engram:
        _check_engram(config)


def _check_engram(config: Description) -> None:
    numbers, largest = config.ngram_multipliers, (MAX_MIXED - 1) // config.vocab_size
    lengths = [len(of_layer) for of_layer in numbers]
    if lengths != [config.ngram_order] * len(config.stem_layers):
        raise ValueError(
            f"ngram_multipliers has {lengths} numbers; expected {config.ngram_order} for each of "
            f"{len(config.stem_layers)} layers"
        )
    if wrong := [n for of_layer in numbers for n in of_layer if not 0 < n <= largest]:
        raise ValueError(
            f"ngram_multipliers has {wrong[0]}; expected 1 to {largest}, so that products have 64 bits"
        )
    if not 0 <= config.ngram_filler < config.vocab_size:
        raise ValueError(
            f"ngram_filler is {config.ngram_filler}; expected 0 to {config.vocab_size - 1}"
        )
    if config.borrowed_kv_layers:
        raise ValueError("an engram model whose last layers borrow keys and values")
    if not 0 <= config.engram_kernel <= MAX_KERNEL:
        raise ValueError(f"engram_kernel is {config.engram_kernel}; expected 0 to {MAX_KERNEL}")


def _check_extras(config: Description) -> None:
    unknown = [name for name in config.biases if name not in BIASED]
    if unknown or len(set(config.biases)) < len(config.biases):
        raise ValueError(f"biases {config.biases}; expected some of {', '.join(BIASED)}, once each")
    if "head" in config.biases and config.tied_head:
        raise ValueError("a head that is tied to the embedding cannot have a bias")
    if not 0 <= config.sliding_window <= MAX_CONTEXT:
        raise ValueError(f"sliding_window is {config.sliding_window}; expected 0 to {MAX_CONTEXT}")
    if config.logit_softcap and not LEAST_SCALING <= config.logit_softcap <= MAX_SOFTCAP:
        raise ValueError(
            f"logit_softcap is {config.logit_softcap}; expected 0, or {LEAST_SCALING:g} to "
            f"{MAX_SOFTCAP:g}"
        )
    if config.qk_norm_eps is not None and not 0 <= config.qk_norm_eps < 1:
        raise ValueError(f"qk_norm_eps is {config.qk_norm_eps}; expected 0 to 1")
    for field in ("embedding_scale", "ple_scale", "attention_scale"):
        value, least = getattr(config, field), 0 if field == "attention_scale" else LEAST_SCALING
        if not least <= value <= MAX_WIDTH:
            raise ValueError(f"{field} is {value}; expected {least} to {MAX_WIDTH}")
    if config.activation not in get_args(Activation):
        raise ValueError(f"activation is {config.activation!r}; expected silu or gelu")
    if config.v_norm and config.qk_norm_eps is None:
        raise ValueError("v_norm needs the epsilon of qk_norm_eps")


def _check_altup(config: Description) -> None:
    if not 0 <= config.active_stream < config.streams <= MAX_STREAMS:
        raise ValueError(
            f"active_stream is {config.active_stream} and streams {config.streams}; expected one of "
            f"1 to {MAX_STREAMS} streams, counted from 0"
        )
    if config.ple_gate_scale and not (config.streams > 1 and config.ple_width):
        raise ValueError("ple_gate_scale needs several streams and per-layer embeddings")
    if config.layer_scale and config.streams > 1:
        raise ValueError(f"layer_scale in a model with {config.streams} streams; expected 1 stream")
    if not 0 <= config.laurel_rank <= MAX_WIDTH:
        raise ValueError(f"laurel_rank is {config.laurel_rank}; expected 0 to {MAX_WIDTH}")


def check_ranges(ranges: Mapping[str, tuple[float, float]], matrices: Collection[str]) -> None:
    """Raise ValueError for ranges of what is not multiplied, and for impossible steps."""
    for name, steps in ranges.items():
        if name not in matrices:
            raise ValueError(f"ranges of {name[:64]!r}, which is no matrix that is multiplied")
        if not all(step == 0 or LEAST_STEP <= step <= 1 / LEAST_STEP for step in steps):
            raise ValueError(
                f"ranges of {name} are {steps}; expected 0, or {LEAST_STEP:g} to {1 / LEAST_STEP:g}"
            )


def _check_scaling(scaling: RopeScaling) -> None:
    for field in scaling.__struct_fields__:
        value = getattr(scaling, field)
        if not isinstance(value, bool) and not LEAST_SCALING <= value <= MAX_CONTEXT:
            raise ValueError(
                f"{field} of the RoPE scaling is {value}; "
                f"expected {LEAST_SCALING:g} to {MAX_CONTEXT}"
            )
    if isinstance(scaling, ProportionalRope) and scaling.share > 1:
        raise ValueError(f"share of the proportional RoPE is {scaling.share}; expected up to 1")
    if not 1 <= scaling.factor <= MAX_FACTOR:
        raise ValueError(
            f"factor of the RoPE scaling is {scaling.factor}; expected 1 to {MAX_FACTOR}"
        )
    if isinstance(scaling, Llama3Rope) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError("low_freq_factor of the RoPE scaling is not below high_freq_factor")
