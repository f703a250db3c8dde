"""Memory needs of a backbone on onnxruntime: on the CPU, on a device, with portable graphs."""

from __future__ import annotations

from dataclasses import replace

from stem_edge.bundle.footprint import FLOAT, HALF, SLOT_BOOKKEEPING_NBYTES, Footprint
from stem_edge.bundle.prefill_check import PROBE_TOKENS
from stem_edge.config import ModelConfig
from stem_edge.graph.device_rows import Activations, DeviceRows
from stem_edge.graph.float_blocks import BLOCK_NBYTES
from stem_edge.graph.linear import SPLIT_VALUES
from stem_edge.graph.names import head_width
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS, Device, Needs, Part, Preparing
from stem_edge.runtime.backends.step_costs import BEFORE, SIZES

HIDDEN_ARRAYS, HIDDEN_ARRAYS_OF_STREAMS = 8, 14
WIDE_ARRAYS, WIDE_ARRAYS_OF_PREFILL = 10, 15
CONTEXT_ARRAYS = 4  # of per-layer embeddings: their product with the context, on its way to layers
LOGIT_ARRAYS = 3  # logits of every position: as given back, and on their way through the head
# Kept by onnxruntime for itself. Beside mapped weights: measured with 1B models (docs/results.md),
# and never more than the weights. Beside weights in its own memory: measured with small models.
PREPARED_FIXED_NBYTES = 32 << 20
UNPREPARED_FIXED_NBYTES = 12 << 20
# That covers this many layers; each further one adds a few dozen nodes to each graph.
LAYERS_IN_FIXED, LAYER_NBYTES = 32, 1 << 18
# Kept by a provider's library in this process.
HOST_FIXED_NBYTES = 64 << 20
# Kept by onnxruntime on a device for itself: buffers of kernels, and pools.
DEVICE_FIXED_NBYTES = 16 << 20
MASK_VALUE_NBYTES = 16  # a float32 and the integers that it is computed from
SCORE_ARRAYS = 3  # of portable graphs: scores, masked, and after softmax
# Keys whose scores are in memory at once on the CPU, where attention goes through them in blocks: a
# chunk takes as much after 16,000 tokens as after 1,000 (measured with onnxruntime 1.31 and 1.32).
SCORED_AT_ONCE = 512
# Preparing: files hold every matrix plain and packed, and packing pads a little. A matrix is in memory
# packed, read to be saved, and packed again to be compared; seconds a GB are measured (docs/results.md).
FILES_OVER_DATA, COPIES_OF_MATRIX, PREPARING_SECONDS_PER_GB = 2.2, 3, 30
LOGITS_AT_ONCE = 16  # of a probe, because on their way through the head they take more
WORKER_NBYTES = 40 << 20  # Python with numpy and onnxruntime
WIDTHS: dict[Activations, int] = {"fp32": FLOAT, "fp16": HALF}  # bytes of an activation


def cpu_needs(
    footprint: Footprint, context: int, threads: int, *, prepared: bool, prefill: bool
) -> Needs:
    """Return the needs on the CPU.

    prepared: weights stay in prepacked files. prefill: the graph for prompts is loaded, too.
    """
    data = footprint.step_nbytes + (footprint.prefill_nbytes if prefill else 0)
    weights = UNPREPARED_FIXED_NBYTES + data
    if prepared:
        weights = min(PREPARED_FIXED_NBYTES, weights)
    deep = max(0, footprint.model.n_layers - LAYERS_IN_FIXED)
    weights += deep * LAYER_NBYTES * (2 if prefill else 1)
    # Attention over float16 does not go in blocks (measured with onnxruntime 1.32).
    scored = context if footprint.kv == "fp16" else min(context, SCORED_AT_ONCE)
    part = Part(
        weights=weights,
        kv_cache=footprint.kv_nbytes(context),
        fixed=_fixed(footprint, context, threads),
        chunk_token=_chunk_token(footprint, scored, prefill=prefill),
        logits=_logits(footprint, scored),
        slot=footprint.slot_nbytes,
    )
    return Needs(footprint, context, part, prepared=prepared, prefill=prefill)


def preparing_needs(footprint: Footprint, threads: int) -> Preparing:
    """Return what preparing takes: the largest matrix packed, or the steps that are then measured."""
    prefill = footprint.prefill_nbytes > 0
    context = CHUNK_TOKENS + max(SIZES)
    part = cpu_needs(footprint, context, threads, prepared=True, prefill=prefill).host
    logits = 2 * FLOAT * PROBE_TOKENS * footprint.model.vocab_size if prefill else 0
    logits += LOGITS_AT_ONCE * (part.chunk_token + part.logits)
    batch = max(SIZES) * footprint.kv_nbytes(BEFORE + 1)
    steps = max(CHUNK_TOKENS * part.chunk_token, logits, batch)
    steps += part.weights + part.kv_cache + part.fixed
    matrix = min(FLOAT * _largest_product(footprint.model), 2 * BLOCK_NBYTES)
    nbytes = footprint.step_nbytes + footprint.prefill_nbytes
    return Preparing(
        disk=int(FILES_OVER_DATA * nbytes),
        memory=WORKER_NBYTES + max(COPIES_OF_MATRIX * matrix, steps),
        seconds=round(PREPARING_SECONDS_PER_GB * nbytes / 10**9),
    )


def portable_needs(footprint: Footprint, context: int, provider: str) -> Needs:
    """Return the needs of portable graphs, which leave rows, masks and KV cache to this process.

    Included are transposed keys and values, and a matrix in floats, twice, because some providers
    dequantize it to multiply.
    """
    needs = cpu_needs(footprint.without_windows(), context, 1, prepared=False, prefill=False)
    config, seen = footprint.model, context + CHUNK_TOKENS
    windows = len({config.window(layer) for layer in range(config.n_layers)})
    layer = config.layer(0)
    cached = 2 * layer.n_kv_heads * head_width(layer)  # values of a token and a layer
    row = footprint.tables.row_width if footprint.tables else 0
    values = row * (len(config.stem_layers) + 2)
    values += SCORE_ARRAYS * config.n_heads * seen + config.n_layers * cached
    once = 2 * cached * seen + 2 * _largest_product(config)
    host = replace(
        needs.host,
        fixed=needs.host.fixed + FLOAT * once + footprint.embedding_nbytes,
        chunk_token=needs.host.chunk_token + FLOAT * values + windows * MASK_VALUE_NBYTES * seen,
    )
    return replace(needs, host=host, provider=provider, variant="portable")


def device_needs(
    footprint: Footprint,
    context: int,
    provider: str,
    variant: Activations,
    *,
    limit: int | None,
    asked: bool,
    shared: bool,
) -> Needs:
    """Return the needs with everything on a device. limit: bytes it may take, None if unknown."""
    footprint = footprint.without_windows().with_kv(variant)
    rows = DeviceRows(footprint.tables, variant) if footprint.tables is not None else None
    slot, width = rows.slot_nbytes if rows is not None else 0, WIDTHS[variant]
    chunk_token = _chunk_token(footprint, context, prefill=False)
    there = Part(
        weights=device_weights_nbytes(footprint),
        kv_cache=footprint.kv_nbytes(context),
        fixed=_fixed(footprint, context, 1) * width // FLOAT,
        chunk_token=chunk_token * width // FLOAT + 2 * slot,  # uploaded rows, and cut into slabs
        logits=_logits(footprint, context),
        slot=slot,
    )
    logits = 2 * FLOAT * footprint.model.vocab_size
    here = Part(0, 0, HOST_FIXED_NBYTES + logits, slot, logits, SLOT_BOOKKEEPING_NBYTES)
    device = Device(there, limit, asked, shared)
    return Needs(footprint, context, here, device, provider=provider, variant=variant)


def device_weights_nbytes(footprint: Footprint) -> int:
    """Return the bytes of weights on a device, alike for fp16 and fp32.

    Both keep codes and float matrices as they are, and the scales that they convert are small.
    """
    return DEVICE_FIXED_NBYTES + footprint.backbone_nbytes


def _fixed(footprint: Footprint, context: int, threads: int) -> int:
    """Return bytes of activations of any chunk: RoPE tables, and logits of a position twice."""
    config = footprint.model
    turning = {layer.rope: head_width(layer) for layer in config.layers}
    values = context * sum(turning.values()) + 2 * config.vocab_size
    return FLOAT * (values + _experts_values(footprint, threads))


def _chunk_token(footprint: Footprint, scored: int, *, prefill: bool) -> int:
    """Return bytes of activations for each token of a chunk. scored: keys with scores at once.

    Layers that borrow K and V count with the logits, because they run for the same positions.
    """
    config = footprint.model
    # The counts are measured, because onnxruntime keeps more arrays alive than the graph needs,
    # most in prefill.
    wide = WIDE_ARRAYS_OF_PREFILL if prefill else WIDE_ARRAYS
    return FLOAT * _layer_values(config, scored, range(config.own_kv_layers), wide)


def _logits(footprint: Footprint, scored: int) -> int:
    """Return bytes for each position whose logits are wanted, except for the only one."""
    config = footprint.model
    borrowing = range(config.own_kv_layers, config.n_layers)
    values = _layer_values(config, scored, borrowing, WIDE_ARRAYS) if borrowing else 0
    return FLOAT * (values + LOGIT_ARRAYS * config.vocab_size)


def _layer_values(config: ModelConfig, scored: int, numbers: range, wide: int) -> int:
    """Return values of a token, in some layers: the greatest of each array.

    They are hidden states and their norms; q, k and v; gate, row, their product, its codes; scores.
    """
    layers = [config.layer(number) for number in numbers]
    heads = max((config.n_heads + 2 * one.n_kv_heads) * head_width(one) for one in layers)
    hidden = HIDDEN_ARRAYS if config.streams == 1 else HIDDEN_ARRAYS_OF_STREAMS
    values = hidden * config.hidden_width + 2 * heads + wide * max(one.d_ff for one in layers)
    contexts = CONTEXT_ARRAYS * len(layers) * config.ple_width
    return values + contexts + config.n_heads * scored


def _experts_values(footprint: Footprint, threads: int) -> int:
    """Return the values of quantized experts, which each thread dequantizes while it runs one."""
    tables = footprint.tables
    if tables is None or not footprint.model.n_experts or not tables.quantized:
        return 0
    return min(threads, CHUNK_TOKENS) * tables.row_width


def _largest_product(config: ModelConfig) -> int:
    """Return the values of the largest matrix that is multiplied at once."""
    layer = config.layer(0)
    wide = max((config.n_heads + 2 * layer.n_kv_heads) * head_width(layer), layer.d_ff)
    return max(config.dim * wide, min(config.vocab_size * config.dim, 2 * SPLIT_VALUES))
