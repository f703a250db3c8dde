"""What is expected of one run that is about to be measured, from what is known before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from stem_edge.bundle import Bundle
from stem_edge.measuring.fit import tokenizer_nbytes
from stem_edge.measuring.hit_rates import record_ids, simulate, token_index
from stem_edge.measuring.predict import OBSERVED, NeedsAt, Prediction, Usage, predict
from stem_edge.measuring.rates import Rates
from stem_edge.measuring.workload import Workload
from stem_edge.runtime.machine import available_memory
from stem_edge.runtime.options import LoadOptions
from stem_edge.runtime.plan import Ask, plan_memory
from stem_edge.runtime.warm import known_counts
from stem_edge.token_counts import Counts

# Cache sizes of a curve, as shares of the vocabulary.
CURVE_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class ExpectedRun:
    """All that is known of a run before it, but for the speed of the machine."""

    at: Callable[[Rates], Prediction]
    hit_curve: dict[int, float]  # slots -> hit rate while decoding; empty for a dense model


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
