"""Decides if a load saves weights repacked for this processor; estimates disk, memory and time for that."""

from __future__ import annotations

from typing import NamedTuple

from stem_edge.bundle.footprint import FLOAT, PREPARED_OVER_DATA, Footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.runtime.backends.costs import MOST
from stem_edge.runtime.backends.onnxruntime.needs import apart_nbytes, cpu_needs
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.shown import format_size
from stem_edge.system.memory import available_memory, own_memory

# Memory of the process that prepares: Python with numpy and onnxruntime, and copies of the matrices that are packed
# together (prepared/packing.py); or Python and open graphs. Measured with SmolLM2-135M and a 1B model.
WORKER_NBYTES, COPIES_OF_GROUP, PACKED_AT_ONCE = 40 << 20, 4, 1 << 24
MEASURING_NBYTES, APART_SHARE, PREPARING_SECONDS_PER_GB = 66 << 20, 0.66, 18
MEASURED_TOKENS = 4 * MOST  # tokens of the text whose last tokens are measured


class Preparing(NamedTuple):
    """Disk, memory and time for saving repacked weights, once, in a separate process at the first load."""

    disk: int  # bytes, which stay in the cache folder
    memory: int  # bytes
    seconds: int  # on two cores of a server processor

    def __str__(self) -> str:
        disk, memory = format_size(self.disk), format_size(self.memory)
        return f"{disk} on disk, {memory} of memory in a process of its own, about {self.seconds} s"


def preparing_needs(footprint: Footprint, threads: int) -> Preparing:
    """Estimate disk, memory and time for repacking weights in groups of matrices, and for timing decoding steps."""
    model, group = footprint.model, PACKED_AT_ONCE
    if footprint.backbone.weights == "fp32":  # in which the head is packed as a whole
        group = max(2 * group, FLOAT * model.vocab_size * model.dim)
    context = min(MEASURED_TOKENS, model.max_context)
    part = cpu_needs(footprint, context, threads, prepared=True, prefill=False).host
    # KV caches of a text and of the sequences of a batch with the same text; logits of steps, to be compared.
    steps = (MOST + 1) * part.kv_cache + MOST * part.logits
    steps += part.fixed + context * part.chunk_token + int(APART_SHARE * apart_nbytes(model))
    nbytes = footprint.step_nbytes + footprint.prefill_nbytes
    return Preparing(
        # The head is a group by itself if it is larger.
        disk=int(PREPARED_OVER_DATA * (nbytes + max(group, model.vocab_size * model.dim))),
        memory=max(WORKER_NBYTES + COPIES_OF_GROUP * group, MEASURING_NBYTES + steps),
        seconds=round(PREPARING_SECONDS_PER_GB * nbytes / 10**9),
    )


def obstacle(bundle: Bundle, footprint: Footprint, options: LoadOptions) -> str:
    """Return an error message if memory is too small for a second process that repacks the weights, else ""."""
    own, needed = own_memory(), preparing_needs(footprint, options.cpus).memory
    allowed = min(options.limit, own + available_memory())
    if own + needed <= allowed:
        return ""
    return (
        f"{bundle.path}: preparing takes {format_size(own + needed, up=True)} of memory, but {format_size(allowed)} "
        f"may be taken; allow more once, else loads are slow and take {format_size(footprint.step_nbytes)} more"
    )
