"""What preparing a backbone takes, and graphs whose matrices can be packed in little memory.

onnxruntime packs a matrix in memory: a head of 128,256 rows would take 1 GB at once. So large float32
matrices are multiplied in blocks of rows, to the same bits, a block of 16 MB each.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from stem_edge.bundle.footprint import FLOAT, Footprint
from stem_edge.config import ModelConfig
from stem_edge.graph.linear import SPLIT_VALUES
from stem_edge.graph.names import head_width
from stem_edge.runtime.backends.interface import BEFORE, MOST, SIZES
from stem_edge.runtime.backends.memory_plan import Needs, Preparing
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs

GROUP_NBYTES = 1 << 24  # of packing.py, which imports more than a load needs

# Files hold every matrix plain and packed, and packing pads a little. The matrix under way is on disk once
# more, in a file of its own. In memory it is packed, read to be saved, and packed again to be compared.
# Seconds a GB are measured (docs/results.md).
FILES_OVER_DATA, COPIES_OF_MATRIX, PREPARING_SECONDS_PER_GB = 2.2, 3, 30
WORKER_NBYTES = 40 << 20  # Python with numpy and onnxruntime


def preparing_needs(footprint: Footprint, threads: int) -> Preparing:
    """Return what preparing takes: the largest matrix packed, or the steps that are then measured."""
    context = min(BEFORE + MOST, footprint.model.max_context)
    part = cpu_needs(footprint, context, threads, prepared=True, prefill=False, guesses=True).host
    # A prompt, then steps that give the logits of each token; or sequences with a copy of the prompt each.
    steps = max(BEFORE * part.chunk_token, MOST * (part.chunk_token + part.logits))
    steps = (
        max(steps, MOST * footprint.kv_nbytes(context)) + part.weights + part.kv_cache + part.fixed
    )
    # Logits of steps of each size, and the copies that are compared.
    steps += (2 * sum(SIZES) + MOST) * FLOAT * footprint.model.vocab_size
    matrix = min(FLOAT * largest_product(footprint.model), 2 * GROUP_NBYTES)
    nbytes = footprint.step_nbytes + footprint.prefill_nbytes
    return Preparing(
        disk=int(FILES_OVER_DATA * (nbytes + matrix)),
        memory=WORKER_NBYTES + max(COPIES_OF_MATRIX * matrix, steps),
        seconds=round(PREPARING_SECONDS_PER_GB * nbytes / 10**9),
    )


def largest_product(config: ModelConfig) -> int:
    """Return the values of the largest matrix that is multiplied at once."""
    wide = [one.d_ff for one in config.layers]
    wide += [(config.n_heads + 2 * one.n_kv_heads) * head_width(one) for one in config.layers]
    if config.ngram_order:
        project = config.layer_shapes(config.stem_layers[0])["project"]
        wide.append(prod(project) // config.dim)
    return max(config.dim * max(wide), min(config.vocab_size * config.dim, 2 * SPLIT_VALUES))


def unpacked(needs: Needs) -> Needs:
    """Return the needs where weights stay as stored: each product makes floats of its whole matrix."""
    fixed = needs.host.fixed + FLOAT * largest_product(needs.footprint.model)
    return replace(needs, host=replace(needs.host, fixed=fixed), prepared=False)
