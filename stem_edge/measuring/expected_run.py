"""What is expected of one run that is about to be measured, from what is known before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stem_edge.bundle import Bundle
from stem_edge.measuring.fit import tokenizer_nbytes
from stem_edge.measuring.hit_rates import record_ids, simulate, token_index
from stem_edge.measuring.predict import IMPORTED_NBYTES, Prediction, predict
from stem_edge.measuring.rates import Rates
from stem_edge.measuring.usage import Usage
from stem_edge.measuring.workload import Workload
from stem_edge.runtime.engines import loaders
from stem_edge.runtime.flash import PROFILES, FlashName
from stem_edge.runtime.machine import available_memory
from stem_edge.runtime.options import LoadOptions
from stem_edge.runtime.plan import Ask, MemoryPlan, Needs, plan_memory
from stem_edge.runtime.warm import known_counts
from stem_edge.token_counts import Counts

# Cache sizes of a curve, as shares of the vocabulary.
CURVE_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class ExpectedRun:
    """All that is known of a run before it, but for the speed of the machine."""

    bundle: Bundle
    plan: MemoryPlan
    usage: Usage
    flash: FlashName | None
    needs: Needs
    tokenizer_nbytes: int
    room: int | None  # what process and mapped files may take together

    def at(self, rates: Rates) -> Prediction:
        """The prediction."""
        return predict(
            self.needs.footprint,
            self.plan,
            self.usage,
            rates,
            PROFILES[self.flash] if self.flash else None,
            prepared=self.needs.prepared,
            prefill=self.needs.prefill,
            repack=self.needs.repack,
            tokenizer_nbytes=self.tokenizer_nbytes,
            memory=self.room,
        )


def expect_run(
    bundle: Bundle, engine: str, workload: Workload, options: LoadOptions, room: int | None
) -> ExpectedRun:
    """What follows from sizes, options and what is in the cache folder. Raises MemoryPlanError."""
    tokenizer = tokenizer_nbytes(bundle.path)
    needs = loaders(bundle, engine, options)[0].needs(options.context(bundle))
    ask = Ask(options.memory, options.row_slots(bundle), options.host_slots)
    process = IMPORTED_NBYTES[needs.footprint.engine] + tokenizer
    plan = plan_memory(bundle.path, needs, ask, process, available_memory())
    usage = _usage(bundle, workload, plan, options)
    return ExpectedRun(bundle, plan, usage, options.emulate_flash, needs, tokenizer, room)


def _usage(bundle: Bundle, workload: Workload, plan: MemoryPlan, options: LoadOptions) -> Usage:
    ids = np.asarray(workload.prompt + workload.following, np.int64)
    prompt, new = len(workload.prompt), len(workload.following)
    distinct = len(np.unique(ids))
    if bundle.manifest.tables is None:
        return Usage(prompt, new, distinct, 0, 1.0)
    if options.resident:
        return Usage(prompt, new, distinct, plan.slots, 1.0)
    hits, filled = simulate(
        record_ids(bundle, ids),
        bundle.manifest.model.records,
        plan.slots,
        warm_counts(bundle, options),
        prompt=prompt,
        chunk=plan.chunk_tokens,
    )
    return Usage(prompt, new, distinct, filled, hits)


def hit_curve(
    bundle: Bundle, workload: Workload, options: LoadOptions, chunk: int
) -> dict[int, float]:
    """Slots -> hit rate while decoding, begun as this run began; empty for a dense model."""
    if bundle.manifest.tables is None:
        return {}
    records, counts = bundle.manifest.model.records, warm_counts(bundle, options)
    ids = record_ids(bundle, np.asarray(workload.prompt + workload.following, np.int64))
    prompt, sizes = len(workload.prompt), {max(4, int(s * records)) for s in CURVE_SHARES}
    return {
        size: simulate(ids, records, size, counts, prompt=prompt, chunk=chunk)[0]
        for size in sorted(sizes)
    }


def warm_counts(bundle: Bundle, options: LoadOptions) -> Counts | None:
    """Uses of records that a warm start will begin with, if there will be one."""
    if not options.warm_start:
        return None
    return known_counts(bundle, token_index(bundle), options.cache_dir)
