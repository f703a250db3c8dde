"""Memory needs of a backbone on onnxruntime's CPU; device/needs.py builds on them for devices."""

from __future__ import annotations

from stem_edge.bundle.footprint import FLOAT, Footprint
from stem_edge.config import ModelConfig
from stem_edge.graph.kv import X86
from stem_edge.graph.names import head_width, kv_capacity
from stem_edge.runtime.backends.costs import SIZES, Needs, Part
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS

HIDDEN_ARRAYS, HIDDEN_ARRAYS_OF_STREAMS = 8, 14
WIDE_ARRAYS, WIDE_ARRAYS_OF_PREFILL = 10, 15
ENGRAM_ARRAYS = 12
CONTEXT_ARRAYS = 4  # arrays of per-layer embeddings' contexts
# Copies of a position's logits: in the head, and as returned. Lower bits of a split head take about one more.
LOGIT_ARRAYS = 3
# Memory that onnxruntime takes for itself if weights are mapped (measured with 1B models, docs/results.md; never
# more than the weights), and if they are in its own memory (measured with small models).
PREPARED_FIXED_NBYTES = 32 << 20
UNPREPARED_FIXED_NBYTES = 12 << 20
# These numbers cover so many layers; each further layer adds a few dozen nodes to each graph.
LAYERS_IN_FIXED, LAYER_NBYTES = 32, 1 << 18
# Memory that onnxruntime takes for a layer in each graph for steps of several tokens, and for each token:
# measured with SmolLM2-135M, and with a model of Gemma 4 E2B's shape, whose activation ranges are nodes, too.
APART_LAYER_NBYTES, APART_TOKEN_NBYTES = 150 << 10, 60 << 10
RANGED_LAYER_NBYTES, RANGED_TOKEN_NBYTES = 600 << 10, 100 << 10
# Keys whose scores are in memory at once on the CPU, if attention computes keys in blocks (measured with
# onnxruntime 1.31 and 1.32). It does not in decoding graphs of bundles with a graph for prompts (KvFormat.unblocked).
SCORED_AT_ONCE = 512


def cpu_needs(
    footprint: Footprint,
    context: int,
    threads: int,
    *,
    prepared: bool,
    prefill: bool,
    drafts: bool = False,
) -> Needs:
    """Return the memory needs of a backbone on onnxruntime's CPU.

    prepared: weights are mapped from files. prefill: include the graph that the first long prompt opens.
    drafts: include the graphs for steps of several tokens, which are opened at first use.
    """
    data = footprint.step_nbytes + (footprint.prefill_nbytes if prefill else 0)
    weights = UNPREPARED_FIXED_NBYTES + data
    if prepared:
        weights = min(PREPARED_FIXED_NBYTES, weights)
    weights += footprint.assistant_nbytes
    deep = max(0, footprint.model.n_layers - LAYERS_IN_FIXED)
    weights += deep * LAYER_NBYTES * (2 if prefill else 1)
    later = drafts * apart_nbytes(footprint.model)
    weights += later
    if prefill:
        later += PREPARED_FIXED_NBYTES if prepared else footprint.prefill_nbytes
    blocks = min(context, SCORED_AT_ONCE)
    few = context if footprint.prefill_nbytes and footprint.kv == "fp32" and X86 else blocks
    part = Part(
        weights=weights,
        kv_cache=footprint.kv_nbytes(context),
        fixed=fixed_nbytes(footprint, context, threads)
        + prefill * widened_nbytes(footprint, context),
        chunk_token=chunk_token_nbytes(footprint, blocks if prefill else few, prefill=prefill),
        logits=logits_nbytes(footprint, few),
        later=later,
    )
    return Needs(footprint, context, part, mapped=prepared * footprint.step_nbytes, prefill=prefill)


def apart_nbytes(model: ModelConfig) -> int:
    """Return the bytes of the graphs for steps of several tokens, without their weights."""
    layer, token = APART_LAYER_NBYTES, APART_TOKEN_NBYTES
    if model.ranges:
        layer, token = RANGED_LAYER_NBYTES, RANGED_TOKEN_NBYTES
    return model.n_layers * (len(SIZES) * layer + sum(SIZES) * token)


def fixed_nbytes(footprint: Footprint, context: int, threads: int) -> int:
    """Return the bytes of activations that do not depend on chunk size: RoPE tables, two logit vectors, experts."""
    config = footprint.model
    turning = {layer.rope: head_width(layer) for layer in config.layers}
    values = context * sum(turning.values()) + (2 + footprint.backbone.split) * config.vocab_size
    return FLOAT * (values + _experts_values(footprint, threads))


def widened_nbytes(footprint: Footprint, context: int) -> int:
    """Return the bytes that the graph for prompts needs to copy a layer's int8 KV cache and widen it to float32."""
    if footprint.kv != "int8":
        return 0
    layers = footprint.model.layers[: footprint.model.own_kv_layers]
    codes = max(
        one.n_kv_heads * head_width(one) * kv_capacity(one.window, context) for one in layers
    )
    return 2 * codes * (FLOAT + 1)


def chunk_token_nbytes(footprint: Footprint, scored: int, *, prefill: bool) -> int:
    """Return bytes of activations per token of a prompt chunk. scored: keys whose attention scores are stored at once.

    Layers that reuse an earlier layer's K and V are not included: they run only for tokens with logits.
    """
    config = footprint.model
    # The counts are measured, because onnxruntime holds more arrays than graphs need, most in prefill.
    wide = WIDE_ARRAYS_OF_PREFILL if prefill else WIDE_ARRAYS
    return FLOAT * _layer_values(config, scored, range(config.own_kv_layers), wide)


def logits_nbytes(footprint: Footprint, scored: int) -> int:
    """Return the bytes of memory for each token whose logits a step computes.

    Layers that reuse an earlier layer's K and V are included, because they run for these tokens only. scored: as above.
    """
    config = footprint.model
    borrowing = range(config.own_kv_layers, config.n_layers)
    values = _layer_values(config, scored, borrowing, WIDE_ARRAYS) if borrowing else 0
    return FLOAT * (values + (LOGIT_ARRAYS + footprint.backbone.split) * config.vocab_size)


def _layer_values(config: ModelConfig, scored: int, numbers: range, wide: int) -> int:
    """Return how many activation values a token has in memory while the layers `numbers` run.

    numbers: indexes of the layers; each array counts as large as in the layer where it is largest.
    wide: number of arrays with d_ff values. scored: as above.
    """
    layers = [config.layer(number) for number in numbers]
    heads = max((config.n_heads + 2 * one.n_kv_heads) * head_width(one) for one in layers)
    hidden = HIDDEN_ARRAYS if config.streams == 1 else HIDDEN_ARRAYS_OF_STREAMS
    values = hidden * config.hidden_width + 2 * heads + wide * max(one.d_ff for one in layers)
    rows = config.mixed_rows * max(one.d_ff for one in layers)
    if config.row_window:  # rows before their mean, and their shares in it
        values += rows + CHUNK_TOKENS + config.row_window
    if config.row_experts:  # rows before they are mixed
        values += rows
    if config.ngram_order:  # gathered rows, rows side by side, and their product
        values += 2 * config.lookups * config.row_rank + config.dim
    if config.stem_ffn == "engram":  # keys, values, the convolution's input and its parts
        values += ENGRAM_ARRAYS * config.dim
    contexts = CONTEXT_ARRAYS * len(layers) * config.ple_width
    return values + contexts + config.n_heads * scored


def _experts_values(footprint: Footprint, threads: int) -> int:
    """Return the number of values in all threads' buffers; each thread dequantizes one expert at a time."""
    tables = footprint.tables
    if tables is None or not footprint.model.n_experts or not tables.quantized:
        return 0
    return min(threads, CHUNK_TOKENS) * tables.row_width
