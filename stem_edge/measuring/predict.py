"""What a bundle will take and how fast it will decode, from bytes and rates.

The memory plan is a promise, so it is the most that may be taken. This is what is expected: constants
here and in predict_ort and predict_ggml were read off measured runs (`stem-edge measure` prints
both), and hold within 10 % for memory and 15 % for the speed of decoding with large models; README
has the runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from stem_edge.footprint import Footprint
from stem_edge.formats import EngineName
from stem_edge.measuring.rates import Rates
from stem_edge.measuring.usage import Held, Usage
from stem_edge.runtime.flash import FlashProfile
from stem_edge.runtime.plan import MemoryPlan
from stem_edge.shards import CRC_NBYTES

# Anonymous memory of a worker with all imports, and of the command `generate` when it begins to load.
IMPORTED_NBYTES: dict[EngineName, int] = {"onnxruntime": 30_200_000, "ggml": 21_100_000}
# The latter is what people are told to give, so it holds 2 MB more than most machines take: a process
# that finds no compiled modules takes 1 MB more, and so do numpy's kernels for some processors.
GENERATING_NBYTES: dict[EngineName, int] = {"onnxruntime": 36_000_000, "ggml": 30_000_000}


@dataclass(frozen=True)
class Prediction:
    """Expected figures. Sizes in bytes, times in seconds."""

    anonymous: int  # at its peak, of the whole process
    mapped: int  # pages of the backbone's files at the end
    kv_cache: int
    row_cache: int
    weights_per_token: int  # read from memory by a decode step
    kv_per_token: int
    rows_per_token: int  # read from flash, on average
    hit_rate: float
    stall_per_token: float  # waiting for flash
    decode_tokens_per_second: float

    def to_dict(self) -> dict[str, float]:
        """All figures, for JSON."""
        return asdict(self)


def predict(
    footprint: Footprint,
    plan: MemoryPlan,
    usage: Usage,
    rates: Rates,
    flash: FlashProfile | None = None,
    *,
    prepared: bool = False,
    prefill: bool = False,
    repack: bool = False,
    tokenizer_nbytes: int = 0,
    memory: int | None = None,
) -> Prediction:
    """Expected figures of one run. `tokenizer_nbytes`: what the loaded tokenizer takes.

    `flash`: None if records come out of the page cache. `memory`: what process and mapped files may
    take together; None: as much as they like. Of onnxruntime alone: whether the backbone is
    `prepared`, and whether there is a graph for prompts; of ggml: whether it is to `repack`.
    """
    base = IMPORTED_NBYTES[footprint.engine] + tokenizer_nbytes
    held = _held(footprint, plan, usage, base, prepared=prepared, prefill=prefill, repack=repack)
    room = math.inf if memory is None else memory - held.anonymous
    stored = footprint.table_format
    record = 0 if stored is None else stored.mean_record_nbytes + CRC_NBYTES
    stall, step = _times(footprint, usage, rates, flash, record)
    return Prediction(
        anonymous=held.anonymous,
        # Where not both fit, the pages that decoding reads push out the others.
        mapped=held.mapped if held.mapped <= room else held.mapped_least,
        kv_cache=held.kv_cache,
        row_cache=0 if footprint.tables is None else usage.filled_slots * footprint.slot_nbytes,
        weights_per_token=footprint.step_nbytes,
        kv_per_token=footprint.kv_nbytes(usage.prompt_tokens + usage.new_tokens // 2),
        rows_per_token=round((1 - usage.hit_rate) * record),
        hit_rate=usage.hit_rate,
        stall_per_token=stall,
        decode_tokens_per_second=1 / (step + stall),
    )


def _held(
    footprint: Footprint,
    plan: MemoryPlan,
    usage: Usage,
    base: int,
    *,
    prepared: bool,
    prefill: bool,
    repack: bool,
) -> Held:
    """By the engine, whose modules alone are imported."""
    if footprint.engine == "ggml":
        from stem_edge.measuring.predict_ggml import held_by_ggml

        return held_by_ggml(footprint, plan, usage, base, repack=repack)
    from stem_edge.measuring.predict_ort import held_by_ort

    return held_by_ort(footprint, plan, usage, base, prepared=prepared, prefill=prefill)


def _times(
    footprint: Footprint, usage: Usage, rates: Rates, flash: FlashProfile | None, record: int
) -> tuple[float, float]:
    """Seconds of stall and of computing in a decode step half way through the new tokens."""
    model = footprint.model
    head = footprint.head_nbytes
    layers = footprint.step_nbytes - head
    early = (model.stem_layers[0] if model.stem_layers else 0) / model.n_layers
    in_layers = layers / rates.weights + model.n_layers * rates.layer_seconds
    kv = footprint.kv_nbytes(usage.prompt_tokens + usage.new_tokens // 2) / rates.kv
    step = in_layers + kv + head / rates.head
    if flash is None or not record:
        return 0.0, step
    # The layers before the first STEM layer run while a record is read.
    wait = max(0.0, flash.latency + record / flash.bandwidth - early * (in_layers + kv))
    return (1 - usage.hit_rate) * wait, step
