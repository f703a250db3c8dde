"""What is expected of one run that is about to be measured, from what is known before it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stem_edge.bundle import Bundle
from stem_edge.footprint import footprint_of
from stem_edge.formats import EngineName
from stem_edge.measuring.fit import tokenizer_nbytes
from stem_edge.measuring.gpu import on_cpu
from stem_edge.measuring.hit_rates import record_ids, simulate, token_index
from stem_edge.measuring.predict import IMPORTED_NBYTES, Prediction, predict
from stem_edge.measuring.rates import Rates
from stem_edge.measuring.usage import Usage
from stem_edge.measuring.workload import Workload
from stem_edge.runtime.engines import plan_on_device
from stem_edge.runtime.flash import PROFILES, FlashName
from stem_edge.runtime.loading import LoadOptions
from stem_edge.runtime.machine import available_memory, usable_cpus
from stem_edge.runtime.plan import Loading, MemoryPlan, plan_memory
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
    loading: Loading
    tokenizer_nbytes: int
    room: int | None  # what process and mapped files may take together

    def at(self, rates: Rates) -> Prediction:
        """The prediction."""
        return predict(
            footprint_of(self.bundle.manifest, self.loading.engine),
            self.plan,
            self.usage,
            rates,
            PROFILES[self.flash] if self.flash else None,
            prepared=self.loading.prepared,
            prefill=self.loading.prefill,
            repack=self.loading.repack,
            tokenizer_nbytes=self.tokenizer_nbytes,
            memory=self.room,
        )


def expect_run(
    bundle: Bundle,
    engine: EngineName,
    workload: Workload,
    options: LoadOptions,
    context: int,
    room: int | None,
) -> ExpectedRun:
    """What follows from sizes, options and what is in the cache folder. Raises MemoryPlanError."""
    tokenizer = tokenizer_nbytes(bundle.path)
    loading = Loading(
        context,
        IMPORTED_NBYTES[engine] + tokenizer,
        engine=engine,
        slots=bundle.manifest.model.records if options.get("resident") else options.get("slots"),
        threads=options.get("threads") or usable_cpus(),
        repack=options.get("repack", False),
        host_slots=options.get("host_slots"),
    )
    if engine == "onnxruntime":
        loading = _on_ort(bundle, loading, options)
    plan = plan_memory(bundle, loading, options.get("memory"), available_memory())
    usage = _usage(bundle, workload, plan, options)
    return ExpectedRun(bundle, plan, usage, options.get("emulate_flash"), loading, tokenizer, room)


def _on_ort(bundle: Bundle, loading: Loading, options: LoadOptions) -> Loading:
    """With the graphs that are there to be loaded."""
    if not on_cpu(options):
        return plan_on_device(
            bundle,
            loading,
            options.get("providers"),
            options.get("provider_libraries"),
            options.get("device_memory"),
        )
    from stem_edge.runtime.loading_ort import choose_prompts, prefill_refused
    from stem_edge.runtime.prepared import find

    cache_dir, wanted = options.get("cache_dir"), options.get("prefill_graph")
    found = find(bundle, cache_dir) if options.get("prepare", True) else None
    refused = prefill_refused(bundle, wanted, cache_dir)
    prompts = choose_prompts(bundle, wanted, refused, found)
    return replace(
        loading,
        prepared=found is not None,
        prefill=prompts.prefill,
        prefill_refused=prompts.refused,
    )


def _usage(bundle: Bundle, workload: Workload, plan: MemoryPlan, options: LoadOptions) -> Usage:
    ids = np.asarray(workload.prompt + workload.following, np.int64)
    prompt, new = len(workload.prompt), len(workload.following)
    distinct = len(np.unique(ids))
    if bundle.manifest.tables is None:
        return Usage(prompt, new, distinct, 0, 1.0)
    if options.get("resident"):
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
    if not options.get("warm_start", True):
        return None
    return known_counts(bundle, token_index(bundle), options.get("cache_dir"))
