"""Checks and tensor shapes of unusual models: n-grams, AltUp, scaled RoPE, int8 activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from msgspec.structs import fields, replace

from stem_edge.description import Description
from stem_edge.layers import Llama3Rope, ProportionalRope, RopeScaling
from stem_edge.limits import (
    LEAST_SCALING,
    LEAST_STEP,
    MAX_CONTEXT,
    MAX_FACTOR,
    MAX_KERNEL,
    MAX_LAYERS,
    MAX_MIXED,
    MAX_ORDER,
    MAX_RECORDS,
    MAX_STREAMS,
)

T = TypeVar("T", bound=Description)
Shapes = dict[str, tuple[int, ...]]
# How the names of fields begin that a model without rows leaves at their defaults.
OF_ROWS = ("stem_ffn", "row_", "n_experts", "engram_", "ngram_", "ple_")


def check_ngrams(config: Description) -> None:
    """Raise ValueError for n-gram fields that are out of range or contradict each other."""
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


def check_altup(config: Description) -> None:
    """Raise ValueError for AltUp fields that are out of range or contradict each other."""
    if not 0 <= config.active_stream < config.streams <= MAX_STREAMS:
        raise ValueError(
            f"active_stream is {config.active_stream} and streams {config.streams}; expected one of "
            f"1 to {MAX_STREAMS} streams, counted from 0"
        )
    if config.ple_gate_scale and not (config.streams > 1 and config.ple_width):
        raise ValueError("ple_gate_scale needs several streams and per-layer embeddings")
    if config.layer_scale and config.streams > 1:
        raise ValueError(f"layer_scale in a model with {config.streams} streams; expected 1 stream")


def check_ranges(ranges: Mapping[str, tuple[float, float]], matrices: Collection[str]) -> None:
    """Check int8 activation scales. ranges: matrix -> (input, output). Raises ValueError."""
    for name, steps in ranges.items():
        if name not in matrices:
            raise ValueError(f"ranges of {name[:64]!r}, which is no matrix that is multiplied")
        if not all(step == 0 or LEAST_STEP <= step <= 1 / LEAST_STEP for step in steps):
            raise ValueError(
                f"ranges of {name} are {steps}; expected 0, or {LEAST_STEP:g} to {1 / LEAST_STEP:g}"
            )


def check_scaling(scaling: RopeScaling) -> None:
    """Raise ValueError for RoPE scaling parameters that are out of range."""
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


def more_shapes(config: Description, layer: int) -> Shapes:
    """Return name -> shape of a layer's n-gram, per-layer embedding, AltUp and LAuReL tensors."""
    dim, ple, kind, shapes = config.dim, config.ple_width, config.ffn_kind(layer), Shapes()
    if kind == "ngrams":
        shapes["project"] = (dim, config.lookups * config.row_rank)
    if kind == "engram":
        each = config.lookups // len(config.stem_layers) * config.row_rank
        vectors = ["engram_query_norm", "engram_key_norm"]
        vectors += ["engram_conv_norm"] if config.engram_kernel else []
        vectors += [f"engram_conv_{tap}" for tap in range(config.engram_kernel)]  # the oldest first
        shapes |= {"project": (2 * dim, each)} | dict.fromkeys(vectors, (dim,))
    if kind == "ple":
        shapes |= {"ple_context": (ple, dim), "ple_gate": (ple, dim), "ple_out": (dim, ple)}
        shapes["ple_post_norm"] = (dim,)
    if (streams := config.streams) > 1:
        shapes |= {"altup_norm": (dim,), "altup_router": (streams, dim)}
        shapes |= {"altup_predict": (streams**2, streams), "altup_correct": (streams, streams)}
        shapes |= {"ple_gate_scale": (dim,)} if config.ple_gate_scale else {}
    if rank := config.laurel_rank:
        shapes |= {"laurel_in": (rank, dim), "laurel_out": (dim, rank), "laurel_norm": (dim,)}
    return shapes


def dense_twin(config: T) -> T:
    """Return the description of the same model without tables: all its FFNs are dense."""
    usual = {f.name: f.default for f in fields(config) if f.name.startswith(OF_ROWS)}
    return replace(config, stem_layers=(), **usual)


def is_plain(config: Description) -> bool:
    """Return True if layers are of one kind, with SiLU, and without n-grams, AltUp or LAuReL."""
    scales = (config.embedding_scale, config.attention_scale)
    unusual = config.layer_kinds or config.borrowed_kv_layers or config.ple_width
    unusual = unusual or config.v_norm or config.layer_scale or config.activation != "silu"
    unusual = unusual or config.streams > 1 or config.laurel_rank or bool(config.ranges)
    return not (unusual or config.ngram_order) and scales == (1.0, 0.0)
