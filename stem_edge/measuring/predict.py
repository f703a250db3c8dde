"""What a bundle will take and how fast it will decode, from bytes and rates.

The memory plan is a promise, so it is the most that may be taken. This is what is expected: constants
here were read off measured runs (`stem-edge measure` prints both), and hold within 10 % for memory
and 15 % for the speed of decoding with large models; README has the runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from stem_edge.footprint import FLOAT, Footprint
from stem_edge.graph_io import head_width
from stem_edge.measuring.rates import Rates
from stem_edge.runtime.backend_ort import KV_STEP
from stem_edge.runtime.engine import PREFILL_FROM
from stem_edge.runtime.flash import FlashProfile
from stem_edge.runtime.plan import MemoryPlan
from stem_edge.shards import CRC_NBYTES

# Anonymous memory of a worker with all imports, and of the command `generate` when it begins to load.
IMPORTED_NBYTES, GENERATING_NBYTES = 30_200_000, 34_000_000
# Of sessions beside their weights; of one more for prompts.
SESSIONS_NBYTES, PREFILL_SESSION_NBYTES = 6_000_000, 4_500_000
# Packed in memory, matrices are padded; packed in a file, too.
PACKED_OVER_DATA, PREPARED_OVER_DATA = 1.05, 1.07
# While sessions over mapped weights are made, so much of the data is in memory for a moment.
LOADING_SHARE = 0.07
# Arrays of d_ff values alive at once for each token of a prompt chunk, in a STEM model and a dense one.
WIDE_ARRAYS_OF_STEM, WIDE_ARRAYS_OF_DENSE = 7.5, 2.7
# Of the scores of a chunk's tokens with all before them, what is in memory at once.
ATTENTION_SHARE = 0.4
# Of the embedding, its scales are read whole; of its codes, what the system maps around a row.
EMBEDDING_SHARE, MAPPED_AROUND_ROW = 0.26, 40_000
# Around the small tensors of each graph, wherever they are read, the system maps so much.
MAPPED_AROUND_GRAPH, GRAPHS = 1 << 16, 6


@dataclass(frozen=True)
class Usage:
    """What is done with the bundle."""

    prompt_tokens: int
    new_tokens: int
    distinct_tokens: int  # of both together
    filled_slots: int  # of the row cache, in the end
    hit_rate: float  # of the row cache, while decoding

    @property
    def tokens(self) -> int:
        """In the context at the end."""
        return self.prompt_tokens + self.new_tokens


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
    prepared: bool,
    prefill: bool,
    tokenizer_nbytes: int = 0,
    memory: int | None = None,
) -> Prediction:
    """Expected figures of one run. `tokenizer_nbytes`: what the loaded tokenizer takes.

    `flash`: None if records come out of the page cache. `memory`: what process and mapped files may
    take together; None: as much as they like.
    """
    prefill = prefill and footprint.prefill_nbytes > 0
    tables = footprint.tables
    row_cache = 0 if tables is None else usage.filled_slots * footprint.slot_nbytes
    kv_cache = _kv_capacity(footprint, plan.context_length, usage)
    fixed = IMPORTED_NBYTES + SESSIONS_NBYTES + tokenizer_nbytes
    data = footprint.step_nbytes + (footprint.prefill_nbytes if prefill else 0)
    if prepared:
        fixed += PREFILL_SESSION_NBYTES if prefill else 0
    else:
        fixed += int(PACKED_OVER_DATA * data)
    loading = fixed + (int(LOADING_SHARE * footprint.prefill_nbytes) if prepared and prefill else 0)
    running = fixed + kv_cache + row_cache + _activations(footprint, plan, usage)
    anonymous = max(loading, running)
    room = math.inf if memory is None else memory - anonymous
    stored = footprint.table_format
    record = 0 if stored is None else stored.mean_record_nbytes + CRC_NBYTES
    stall, step = _times(footprint, usage, rates, flash, record)
    return Prediction(
        anonymous=anonymous,
        mapped=_mapped(footprint, usage, room, prepared=prepared, prefill=prefill),
        kv_cache=kv_cache,
        row_cache=row_cache,
        weights_per_token=footprint.step_nbytes,
        kv_per_token=footprint.kv_nbytes(usage.prompt_tokens + usage.new_tokens // 2),
        rows_per_token=round((1 - usage.hit_rate) * record),
        hit_rate=usage.hit_rate,
        stall_per_token=stall,
        decode_tokens_per_second=1 / (step + stall),
    )


def _kv_capacity(footprint: Footprint, context: int, usage: Usage) -> int:
    """The KV cache grows in steps: see stem_edge.runtime.backend_ort."""
    capacity = min(context, -(-(usage.prompt_tokens + 1) // KV_STEP) * KV_STEP)
    while capacity < min(context, usage.tokens):
        capacity = min(context, 2 * capacity)
    return footprint.kv_nbytes(capacity)


def _activations(footprint: Footprint, plan: MemoryPlan, usage: Usage) -> int:
    """Of the last chunk of the prompt, which attends to all of it, and records on their way."""
    model, chunk = footprint.model, min(plan.chunk_tokens, usage.prompt_tokens)
    stem = footprint.tables is not None
    wide = WIDE_ARRAYS_OF_STEM if stem else WIDE_ARRAYS_OF_DENSE
    per_token = 8 * model.dim + wide * model.d_ff
    per_token += 2 * (model.n_heads + 2 * model.n_kv_heads) * head_width(model)
    attention = ATTENTION_SHARE * model.n_heads * usage.prompt_tokens
    values = chunk * (per_token + attention) + 2 * model.vocab_size
    records = 0
    if (tables := footprint.tables) is not None:
        records = 2 * min(chunk, tables.records) * tables.record_nbytes
    return int(FLOAT * values + records)


def _mapped(
    footprint: Footprint, usage: Usage, room: float, *, prepared: bool, prefill: bool
) -> int:
    touched = int(EMBEDDING_SHARE * footprint.embedding_nbytes)
    touched += usage.distinct_tokens * MAPPED_AROUND_ROW
    touched = min(touched, footprint.embedding_nbytes)
    if not prepared:
        return touched + GRAPHS * MAPPED_AROUND_GRAPH
    decoding = touched + int(PREPARED_OVER_DATA * footprint.step_nbytes)
    uses_prefill = prefill and usage.prompt_tokens >= PREFILL_FROM
    both = decoding + (footprint.prefill_nbytes if uses_prefill else 0)
    # Where not both fit, the pages that decoding reads push out those of the prompt.
    return both if both <= room else decoding


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
