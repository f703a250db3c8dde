"""Predictions of the memory that a bundle will take, and of the speed that bandwidth allows it.

The memory plan is a promise: what a full context would take at most. A prediction is for a run of
so many tokens, from the same needs (`stem-edge measure` prints both; docs/measuring.md has runs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.measuring.planning.hit_rates import record_ids, simulate, token_index
from stem_edge.measuring.planning.process import worker_nbytes
from stem_edge.measuring.workload import Workload
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.expected import NeedsAt
from stem_edge.runtime.backends.memory_plan import Ask, MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.planner import plan_memory
from stem_edge.runtime.rows.emulated_flash import PROFILES
from stem_edge.runtime.rows.shards import FlashName
from stem_edge.runtime.rows.warm import known_counts
from stem_edge.system.memory import available_memory
from stem_edge.tables.shards import CRC_NBYTES
from stem_edge.tables.token_counts import Counts
from stem_edge.text.checked_tokenizer import TokenizerMemory
from stem_edge.text.tokenizer_gate import check_tokenizer

# Of tables elsewhere, by how their address begins: what reads them, with its threads and connections.
FAR_NBYTES = {"hf:": 112_000_000, "http": 14_500_000, "": 3_500_000}
NO_TOKENIZER = TokenizerMemory(0, 0)
# Cache sizes of a hit curve, as shares of the vocabulary.
CURVE_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Usage:
    """Tokens that a run processes, and what the row cache makes of them."""

    prompt_tokens: int
    new_tokens: int
    distinct_tokens: int  # in prompt and new tokens together
    filled_slots: int  # at the end
    hit_rate: float  # while decoding
    sequences: int = 1  # of so many tokens each, at a time


@dataclass(frozen=True)
class Prediction:
    """Expected figures. Sizes in bytes, times in seconds."""

    anonymous: int  # peak of the whole process
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
        """Return all figures, for JSON."""
        return asdict(self)


def predict(
    needs_at: NeedsAt,
    plan: MemoryPlan,
    usage: Usage,
    bandwidth: float,
    flash: FlashName | None = None,
    *,
    process: int,
    tokenizer: TokenizerMemory = NO_TOKENIZER,
    room: int | None = None,
) -> Prediction:
    """Predict the figures of one run, and of the speed the most that the bandwidth allows.

    `flash`: None if records come out of the page cache. `process`: its memory before it loads.
    `tokenizer`: that of the tokenizer. `room`: limit of process and mapped files together; None without one.
    """
    needs = needs_at(plan.context_length)
    footprint, model, engine = (
        needs.footprint,
        needs.footprint.model,
        ENGINES[needs.footprint.engine].ways.expected,
    )
    stored = footprint.table_format
    tokens = min(plan.context_length, usage.prompt_tokens + usage.new_tokens)
    kv_cache = usage.sequences * footprint.kv_nbytes(tokens)
    row_cache = usage.filled_slots * footprint.slot_nbytes if stored else 0
    peak = row_cache + _peak(needs_at, plan, usage)
    loaded, meanwhile = engine.loaded(needs)
    loaded += max(peak, meanwhile)
    anonymous = process + max(tokenizer.kept + loaded, tokenizer.loading)
    mapped, for_prompts = engine.mapped(needs, usage.prompt_tokens, usage.distinct_tokens)
    if room is None or anonymous + mapped + for_prompts <= room:
        mapped += for_prompts  # otherwise the pages that decoding reads push these out
    record = 0 if stored is None else stored.mean_record_nbytes + CRC_NBYTES
    missed = (1 - usage.hit_rate) * model.lookups
    kv_per_token = footprint.kv_read_nbytes(usage.prompt_tokens + usage.new_tokens // 2)
    step = (footprint.step_nbytes + kv_per_token) / bandwidth
    early = step * model.stem_layers[0] / model.n_layers if model.stem_layers else 0.0
    stall = missed * _wait(flash, record, early)
    return Prediction(
        anonymous=anonymous,
        mapped=mapped,
        kv_cache=kv_cache,
        row_cache=row_cache,
        weights_per_token=footprint.step_nbytes,
        kv_per_token=kv_per_token,
        rows_per_token=round(missed * record),
        hit_rate=usage.hit_rate,
        stall_per_token=stall,
        decode_tokens_per_second=1 / (step + stall),
    )


def expect_run(
    bundle: Bundle, needs_at: NeedsAt, workload: Workload, options: LoadOptions, room: int | None
) -> tuple[Callable[[float], Prediction], dict[int, float]]:
    """Return a function from bandwidth to a prediction, and slots -> hit rate while decoding.

    The latter is empty for a dense model. room: limit of process and mapped files together; None
    without one. Raises MemoryPlanError.
    """
    tokenizer, context = tokenizer_memory(bundle.path), options.contexts(bundle)[0]
    ask = Ask(options.memory, options.row_slots(bundle), options.sequences)
    needs = needs_at(context)
    process = worker_nbytes(needs.footprint.engine) + _far_nbytes(bundle.tables)
    plan = plan_memory(bundle.path, needs, ask, process + tokenizer.kept, available_memory())
    ids = np.asarray(workload.prompt + workload.following, np.int64)
    hits, filled, curve = 1.0, plan.slots, {}
    if bundle.manifest.tables is not None:
        model = bundle.manifest.model
        records, each = model.records, model.lookups
        simulated = partial(
            simulate,
            record_ids(bundle, ids),
            records,
            counts=warm_counts(bundle, options),
            prompt=len(workload.prompt) * each,
            chunk=plan.chunk_tokens * each,
            splits=0 < model.prompt_rows < len(model.row_layers),
        )
        if not options.resident:
            hits, filled = simulated(plan.slots)
        sizes = sorted({max(4, int(share * records)) for share in CURVE_SHARES})
        curve = {size: simulated(size)[0] for size in sizes}
    usage = Usage(len(workload.prompt), len(workload.following), len(np.unique(ids)), filled, hits)
    at = partial(predict, needs_at, plan, usage, flash=options.emulate_flash, room=room)
    return partial(at, process=process, tokenizer=tokenizer), curve


def _far_nbytes(url: str | None) -> int:
    if url is None:
        return 0
    return next(nbytes for start, nbytes in FAR_NBYTES.items() if url.startswith(start))


def warm_counts(bundle: Bundle, options: LoadOptions) -> Counts | None:
    """Return the counts that a warm start will begin with; None if there will be none."""
    if not options.warm_start:
        return None
    return known_counts(bundle, token_index(bundle), options.cache_dir)


def tokenizer_memory(root: Path) -> TokenizerMemory:
    """Return the memory of a tokenizer; 0 for a checkpoint that has it in another form."""
    path = root / TOKENIZER
    return check_tokenizer(path).memory if path.is_file() else NO_TOKENIZER


def _peak(needs_at: NeedsAt, plan: MemoryPlan, usage: Usage) -> int:
    """Return the bytes of keys, values and activations: those of a prompt are gone while decoding.

    Some engines keep them. The last chunk attends to all of the prompt.
    """
    needs, chunk = needs_at(usage.prompt_tokens), min(plan.chunk_tokens, usage.prompt_tokens)
    footprint, part, engine = (
        needs.footprint,
        needs.host,
        ENGINES[needs.footprint.engine].ways.expected,
    )
    context = min(plan.context_length, usage.prompt_tokens + usage.new_tokens)
    whole, begun = (
        usage.sequences * footprint.kv_nbytes(n) for n in (context, usage.prompt_tokens)
    )
    alive = int(engine.ALIVE * (part.fixed + chunk * part.chunk_token))
    alive += plan.reads * min(chunk, usage.distinct_tokens) // plan.chunk_tokens
    return whole + alive if engine.KEEPS else max(whole, begun + alive)


def _wait(flash: FlashName | None, record: int, early: float) -> float:
    """Return seconds of waiting for a record of so many bytes while `early` of computing runs."""
    if flash is None or not record:
        return 0.0
    return max(0.0, PROFILES[flash].latency + record / PROFILES[flash].bandwidth - early)
