"""Memory needs of a backbone on a device of onnxruntime, or with portable graphs."""

from __future__ import annotations

from dataclasses import replace

from stem_edge.bundle.footprint import FLOAT, HALF, SLOT_BOOKKEEPING_NBYTES, Footprint
from stem_edge.graph.device.lending import lent_values
from stem_edge.graph.device.rows import Activations, DeviceRows
from stem_edge.graph.names import head_width
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS, DeviceNeeds, Needs, Part
from stem_edge.runtime.backends.onnxruntime.needs import (
    chunk_token_nbytes,
    cpu_needs,
    fixed_nbytes,
    logits_nbytes,
)
from stem_edge.runtime.backends.onnxruntime.prepared.packable import largest_product

# Kept by a provider's library in this process.
HOST_FIXED_NBYTES = 64 << 20
# Kept by onnxruntime on a device for itself: buffers of kernels, and pools.
DEVICE_FIXED_NBYTES = 16 << 20
MASK_VALUE_NBYTES = 16  # a float32 and the integers that it is computed from
SCORE_ARRAYS = 3  # of portable graphs: scores, masked, and after softmax
WIDTHS: dict[Activations, int] = {"fp32": FLOAT, "fp16": HALF}  # bytes of an activation


def portable_needs(footprint: Footprint, context: int, provider: str) -> Needs:
    """Return the needs of portable graphs, which leave rows, masks and KV cache to this process.

    Included are transposed keys and values, and a matrix in floats, twice, because some providers
    dequantize it to multiply.
    """
    needs = cpu_needs(footprint.without_windows(), context, 1, prepared=False, prefill=False)
    config, seen = footprint.model, context + CHUNK_TOKENS
    windows = len({layer.window for layer in config.layers})
    # Values of a token in each layer.
    cached = [2 * layer.n_kv_heads * head_width(layer) for layer in config.layers]
    row = footprint.tables.row_width if footprint.tables else 0
    values = row * (len(config.stem_layers) + 2)
    values += SCORE_ARRAYS * config.n_heads * seen + sum(cached[: config.own_kv_layers])
    once = 2 * max(cached) * seen + 2 * largest_product(config)
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
    lent = FLOAT * sum(lent_values(footprint.model).values())
    chunk_token = chunk_token_nbytes(footprint, context, prefill=False) + lent
    there = Part(
        weights=device_weights_nbytes(footprint),
        kv_cache=footprint.kv_nbytes(context),
        fixed=fixed_nbytes(footprint, context, 1) * width // FLOAT,
        chunk_token=chunk_token * width // FLOAT + 2 * slot,  # uploaded rows, and cut into slabs
        logits=logits_nbytes(footprint, context),
        slot=slot,
    )
    logits = 2 * FLOAT * footprint.model.vocab_size
    here = Part(0, 0, HOST_FIXED_NBYTES + logits, slot, logits, SLOT_BOOKKEEPING_NBYTES)
    device = DeviceNeeds(there, limit, asked, shared)
    return Needs(footprint, context, here, device, provider=provider, variant=variant)


def device_weights_nbytes(footprint: Footprint) -> int:
    """Return the bytes of weights on a device, alike for fp16 and fp32.

    Both keep codes and float matrices as they are, and the scales that they convert are small.
    """
    return DEVICE_FIXED_NBYTES + footprint.backbone_nbytes
