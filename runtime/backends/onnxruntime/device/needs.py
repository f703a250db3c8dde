"""Memory needs of a backbone on a device."""

from __future__ import annotations

from dataclasses import replace

from stem_edge.bundle.footprint import FLOAT, Footprint
from stem_edge.config import ModelConfig
from stem_edge.graph.linear import SPLIT_VALUES
from stem_edge.graph.names import head_width
from stem_edge.runtime.backends.costs import Needs, Part
from stem_edge.runtime.backends.memory_plan import CHUNK_TOKENS
from stem_edge.runtime.backends.onnxruntime.needs import (
    chunk_token_nbytes,
    fixed_nbytes,
    logits_nbytes,
)

# What a provider's library takes in this process.
HOST_FIXED_NBYTES = 64 << 20
# What onnxruntime takes on a device for itself: buffers of kernels, and pools.
DEVICE_FIXED_NBYTES = 16 << 20
MASK_VALUE_NBYTES = 16  # a float32 and the integers that it is computed from
SCORE_ARRAYS = 3  # scores, masked, and after softmax
ROW_ARRAYS = 4  # copies of a row while it is dequantized


def device_needs(
    footprint: Footprint, context: int, provider: str, *, limit: int | None, shared: bool
) -> Needs:
    """Return the memory that a backbone needs on a device, and in this process.

    limit: most bytes on the device. shared: the device uses this process's memory. The result
    includes copies of a layer's keys and values, and the largest matrix twice in float32, because
    providers may dequantize it.
    """
    footprint = replace(footprint, windows=False)
    config, tables = footprint.model, footprint.tables
    cached = max(2 * layer.n_kv_heads * head_width(layer) for layer in config.layers)
    once = 2 * cached * (context + CHUNK_TOKENS) + 2 * _largest_product(config)
    values = SCORE_ARRAYS * config.n_heads * context
    values += ROW_ARRAYS * tables.row_width if tables is not None else 0
    masks = len({layer.window for layer in config.layers}) * MASK_VALUE_NBYTES * context
    there = Part(
        weights=device_weights_nbytes(footprint),
        kv_cache=footprint.kv_nbytes(context),
        fixed=fixed_nbytes(footprint, context, 1) + FLOAT * once,
        chunk_token=chunk_token_nbytes(footprint, context, prefill=False)
        + FLOAT * values
        + masks
        + footprint.slot_nbytes,
        logits=logits_nbytes(footprint, context),
    )
    logits = 2 * FLOAT * config.vocab_size
    here = Part(0, 0, HOST_FIXED_NBYTES + logits, footprint.slot_nbytes + masks, logits)
    return Needs(footprint, context, here, there, limit, shared, provider)


def device_weights_nbytes(footprint: Footprint) -> int:
    return DEVICE_FIXED_NBYTES + footprint.backbone_nbytes


def _largest_product(config: ModelConfig) -> int:
    """Return the number of values in the largest matrix that is multiplied at once."""
    wide = [one.d_ff for one in config.layers]
    wide += [(config.n_heads + 2 * one.n_kv_heads) * head_width(one) for one in config.layers]
    return max(config.dim * max(wide), min(config.vocab_size * config.dim, 2 * SPLIT_VALUES))
