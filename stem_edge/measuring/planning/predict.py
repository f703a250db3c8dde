"""What a bundle will take and how fast it will decode: its needs, as measured runs had them.

The memory plan is a promise, so it is the most that may be taken. This is what is expected: of the
same needs, the shares that were taken in measured runs (`stem-edge measure` prints both). It holds
within 10 % for memory and 15 % for the speed of decoding with large models; docs/measuring.md has the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import TOKENIZER, Bundle
from stem_edge.bundle.prefill_check import PREFILL_FROM
from stem_edge.ggml.gguf_schema import repacked_nbytes
from stem_edge.graph.formats import EngineName, GgufFormat
from stem_edge.measuring.planning.hit_rates import record_ids, simulate, token_index
from stem_edge.measuring.planning.models import is_bundle
from stem_edge.measuring.planning.timing import Rates
from stem_edge.measuring.run.workload import Workload
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.backends.plan import Ask, MemoryPlan, Needs, plan_memory
from stem_edge.runtime.rows.flash import PROFILES, FlashName
from stem_edge.runtime.rows.warm import known_counts
from stem_edge.system.memory import available_memory
from stem_edge.tables.shards import CRC_NBYTES
from stem_edge.tables.token_counts import Counts

NeedsAt: TypeAlias = Callable[[int], Needs]  # of a context of so many tokens


@dataclass(frozen=True)
class Observed:
    """Memory of processes that run an engine, in bytes."""

    imported: int  # anonymous, of a worker with all imports
    generating: int  # anonymous, of the command `generate` when it begins to load
    library: int  # of sessions and threads, descriptions of tensors and graphs


# What people are told to give follows from `generating`, so it is 2 MB more than most machines take:
# a process that finds no compiled modules takes 1 MB more, and so do numpy's kernels for some
# processors.
OBSERVED: dict[EngineName, Observed] = {
    "onnxruntime": Observed(30_200_000, 36_000_000, 6_000_000),
    "ggml": Observed(21_100_000, 30_000_000, 3_000_000),
}
# Of the activations that are planned for, those alive at once; of onnxruntime's it depends on whether
# there are tables, and a graph for prompts.
GGML_ACTIVATIONS = 0.7
ORT_ACTIVATIONS = {
    (True, True): 0.54,
    (True, False): 0.74,
    (False, True): 0.32,
    (False, False): 0.43,
}
# Of onnxruntime: packed in memory, matrices are padded; packed in a file, too.
PACKED_OVER_DATA, PREPARED_OVER_DATA = 1.05, 1.07
# The session for prompts; and what of its mapped weights is in memory for a moment while it is made.
PREFILL_SESSION_NBYTES, LOADING_SHARE = 4_500_000, 0.07
# Of onnxruntime's embedding, its scales are read whole; the system maps so much around each row, and
# around the small tensors of all graphs.
EMBEDDING_SHARE, MAPPED_AROUND_ROW, MAPPED_AROUND_GRAPHS = 0.26, 40_000, 6 << 16
# A tokenizer in memory over its tokenizer.json, of vocabularies from 2,000 to 128,000 tokens.
MEMORY_OVER_TOKENIZER = 12
# Cache sizes of a curve, as shares of the vocabulary.
CURVE_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Usage:
    """What is done with the bundle."""

    prompt_tokens: int
    new_tokens: int
    distinct_tokens: int  # of both together
    filled_slots: int  # of the row cache, in the end
    hit_rate: float  # of the row cache, while decoding


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


@dataclass(frozen=True)
class ExpectedRun:
    """All that is known of a run before it, but for the speed of the machine."""

    at: Callable[[Rates], Prediction]
    hit_curve: dict[int, float]  # slots -> hit rate while decoding; empty for a dense model


def predict(
    needs_at: NeedsAt,
    plan: MemoryPlan,
    usage: Usage,
    rates: Rates,
    flash: FlashName | None = None,
    *,
    tokenizer_nbytes: int = 0,
    room: int | None = None,
) -> Prediction:
    """Expected figures of one run. `tokenizer_nbytes`: what the loaded tokenizer takes.

    `flash`: None if records come out of the page cache. `room`: what process and mapped files may
    take together; None: as much as they like.
    """
    needs = needs_at(plan.context_length)
    footprint, stored = needs.footprint, needs.footprint.table_format
    kv_cache = footprint.kv_nbytes(min(plan.context_length, usage.prompt_tokens + usage.new_tokens))
    row_cache = usage.filled_slots * footprint.slot_nbytes if stored else 0
    anonymous = OBSERVED[footprint.engine].imported + tokenizer_nbytes
    anonymous += _loaded(needs) + max(
        int(LOADING_SHARE * footprint.prefill_nbytes) if needs.prepared and needs.prefill else 0,
        kv_cache + row_cache + _activations(needs_at(usage.prompt_tokens), plan, usage),
    )
    mapped, of_prompts = _mapped(needs, usage)
    # Where not both fit, the pages that decoding reads push out the others.
    both_fit = anonymous + mapped + of_prompts <= (math.inf if room is None else room)
    record = 0 if stored is None else stored.mean_record_nbytes + CRC_NBYTES
    kv_per_token = footprint.kv_nbytes(usage.prompt_tokens + usage.new_tokens // 2)
    step, stall = _times(footprint, kv_per_token, rates, record, flash)
    stall *= 1 - usage.hit_rate
    return Prediction(
        anonymous=anonymous,
        mapped=mapped + (of_prompts if both_fit else 0),
        kv_cache=kv_cache,
        row_cache=row_cache,
        weights_per_token=footprint.step_nbytes,
        kv_per_token=kv_per_token,
        rows_per_token=round((1 - usage.hit_rate) * record),
        hit_rate=usage.hit_rate,
        stall_per_token=stall,
        decode_tokens_per_second=1 / (step + stall),
    )


def expect_run(
    bundle: Bundle, needs_at: NeedsAt, workload: Workload, options: LoadOptions, room: int | None
) -> ExpectedRun:
    """What follows from needs, options and what is in the cache folder. Raises MemoryPlanError.

    room: what process and mapped files may take together; None: as much as they like.
    """
    tokenizer, context = tokenizer_nbytes(bundle.path), options.context(bundle)
    ask = Ask(options.memory, options.row_slots(bundle), options.host_slots)
    needs = needs_at(context)
    process = OBSERVED[needs.footprint.engine].imported + tokenizer
    plan = plan_memory(bundle.path, needs, ask, process, available_memory())
    ids = np.asarray(workload.prompt + workload.following, np.int64)
    hits, filled, curve = 1.0, plan.slots, {}
    if bundle.manifest.tables is not None:
        records, prompt = bundle.manifest.model.records, len(workload.prompt)
        simulated = partial(
            simulate,
            record_ids(bundle, ids),
            records,
            counts=warm_counts(bundle, options),
            prompt=prompt,
            chunk=plan.chunk_tokens,
        )
        if not options.resident:
            hits, filled = simulated(plan.slots)
        sizes = sorted({max(4, int(share * records)) for share in CURVE_SHARES})
        curve = {size: simulated(size)[0] for size in sizes}
    usage = Usage(len(workload.prompt), len(workload.following), len(np.unique(ids)), filled, hits)
    at = partial(
        predict,
        needs_at,
        plan,
        usage,
        flash=options.emulate_flash,
        tokenizer_nbytes=tokenizer,
        room=room,
    )
    return ExpectedRun(at, curve)


def warm_counts(bundle: Bundle, options: LoadOptions) -> Counts | None:
    """Uses of records that a warm start will begin with, if there will be one."""
    if not options.warm_start:
        return None
    return known_counts(bundle, token_index(bundle), options.cache_dir)


def tokenizer_nbytes(root: Path) -> int:
    """What a bundle's tokenizer will take in memory; of a checkpoint nobody knows."""
    if not is_bundle(root):
        return 0
    return int(MEMORY_OVER_TOKENIZER * (root / TOKENIZER).stat().st_size)


def read_in_place(needs: Needs) -> int:
    """Bytes of weights that every token reads in mapped files."""
    footprint = needs.footprint
    if footprint.engine == "ggml":
        return footprint.step_nbytes - (footprint.repacked_nbytes if needs.repack else 0)
    return footprint.step_nbytes if needs.prepared else 0


def _loaded(needs: Needs) -> int:
    """Anonymous memory that loading adds: the library's, and weights that stay in no file."""
    footprint, library = needs.footprint, OBSERVED[needs.footprint.engine].library
    if footprint.engine == "ggml":
        return library + (footprint.repacked_nbytes if needs.repack else 0)
    if needs.prepared:
        return library + (PREFILL_SESSION_NBYTES if needs.prefill else 0)
    data = footprint.step_nbytes + (footprint.prefill_nbytes if needs.prefill else 0)
    return library + int(PACKED_OVER_DATA * data)


def _activations(needs: Needs, plan: MemoryPlan, usage: Usage) -> int:
    """Bytes for the last chunk of the prompt, which attends to all of it, and its records."""
    chunk = min(plan.chunk_tokens, usage.prompt_tokens)
    share = GGML_ACTIVATIONS
    if needs.footprint.engine == "onnxruntime":
        share = ORT_ACTIVATIONS[needs.footprint.tables is not None, needs.prefill]
    reads = plan.reads * chunk // plan.chunk_tokens
    return int(share * (needs.host.fixed + chunk * needs.host.chunk_token)) + reads


def _mapped(needs: Needs, usage: Usage) -> tuple[int, int]:
    """Bytes of mapped pages that decoding reads, and of those that only prompts read."""
    footprint = needs.footprint
    touched = usage.distinct_tokens * MAPPED_AROUND_ROW
    if isinstance(footprint.backbone, GgufFormat):
        from stem_edge.runtime.backends.ggml.weights import repacked_for_prompts

        touched = min(touched, footprint.embedding_nbytes)
        whole = min(footprint.step_nbytes + touched, footprint.backbone_nbytes)
        if not needs.repack:
            return whole, 0
        copied = repacked_nbytes(footprint.model, footprint.backbone.weights)
        return whole - sum(n for kind, n in copied.items() if repacked_for_prompts(kind)), 0
    touched += int(EMBEDDING_SHARE * footprint.embedding_nbytes)
    touched = min(touched, footprint.embedding_nbytes)
    if not needs.prepared:
        return touched + MAPPED_AROUND_GRAPHS, 0
    uses_prefill = needs.prefill and usage.prompt_tokens >= PREFILL_FROM
    weights = int(PREPARED_OVER_DATA * footprint.step_nbytes)
    return touched + weights, footprint.prefill_nbytes if uses_prefill else 0


def _times(
    footprint: Footprint, kv_nbytes: int, rates: Rates, record: int, flash: FlashName | None
) -> tuple[float, float]:
    """Seconds of computing in a decode step, and of waiting for a record of so many bytes."""
    model, head = footprint.model, footprint.head_nbytes
    layers = (footprint.step_nbytes - head) / rates.weights + model.n_layers * rates.layer_seconds
    layers += kv_nbytes / rates.kv
    step = layers + head / rates.head
    if flash is None or not record:
        return step, 0.0
    # The layers before the first STEM layer run while a record is read.
    early, profile = model.stem_layers[0] / model.n_layers, PROFILES[flash]
    return step, max(0.0, profile.latency + record / profile.bandwidth - early * layers)
