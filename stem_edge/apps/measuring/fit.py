"""Plan a bundle for a device without running it: what fits, and an upper bound of the speed.

The memory limit covers all that fast decoding needs in memory: anonymous memory, and the mapped
weights that every token reads. The memory left by these weights is planned as in stem_edge.load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from stem_edge.apps.measuring.bandwidth import Bandwidth, bandwidth_of
from stem_edge.apps.measuring.device_profiles import find_device
from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import TABLES, TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import MemoryPlanError
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.engines import choose_engine, loader
from stem_edge.runtime.backends.memory_plan import USUAL_CONTEXT, MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.load_plan import loader_of_kv, open_text
from stem_edge.runtime.loading import open_or_make
from stem_edge.runtime.rows.emulated_flash import PROFILES
from stem_edge.runtime.rows.files import FlashName
from stem_edge.shown import format_size, parse_size
from stem_edge.system.memory import available_memory, own_memory
from stem_edge.tables.store import open_table_store
from stem_edge.tables.token_counts import Counts, counts_of_records, read_counts


@dataclass(frozen=True)
class Fit:
    """Plan and expected figures of a model on a device. Sizes in bytes."""

    needs: Needs
    plan: MemoryPlan  # of anonymous memory, as load makes it
    mapped: int  # weights that every token reads in place, in mapped files
    hit_rate: float  # of the row cache
    hit_source: str  # in words
    bandwidth: Bandwidth
    flash: FlashName | None  # None: records come out of the page cache
    step_seconds: float = 0.0  # that preparing measured on this machine; 0: unknown

    @property
    def footprint(self) -> Footprint:
        """Sizes of the bundle's parts."""
        return self.needs.footprint

    @property
    def tables(self) -> str:
        """Type of the rows; empty for a dense model."""
        return self.footprint.table_format.kind if self.footprint.table_format else ""

    @property
    def memory(self) -> int:
        """Largest anonymous memory of the plan, plus the mapped weights."""
        return self.plan.total + self.mapped

    @property
    def token_nbytes(self) -> int:
        """Bytes that a decoded token reads from memory, halfway through a usual context."""
        position = min(self.plan.context_length, USUAL_CONTEXT) // 2
        return self.footprint.step_nbytes + self.footprint.kv_read_nbytes(position)

    @property
    def stall(self) -> float:
        """Seconds that a decoded token waits for rows from flash, on average."""
        stored, model = self.footprint.table_format, self.footprint.model
        if self.flash is None or stored is None:
            return 0.0
        profile = PROFILES[self.flash]
        record = self.footprint.tables_nbytes / model.records  # those of rare tokens are smaller
        # Records are read while the layers before the first one with rows compute.
        early = self.token_nbytes / self.bandwidth.rate * model.stem_layers[0] / model.n_layers
        wait = max(0.0, profile.latency + record / profile.bandwidth - early)
        return (1 - self.hit_rate) * model.lookups * wait

    @property
    def bound(self) -> float:
        """Upper bound of tokens a second, from bandwidth, stalls and measured time of a step."""
        step = max(self.token_nbytes / self.bandwidth.rate, self.step_seconds)
        return 1 / (step + self.stall)


def fit(
    path: str | Path,
    memory: int | str | None = None,
    *,
    context_length: int | None = None,
    device: str | None = None,
    bandwidth: int | str | None = None,
    threads: int | None = None,
    engine: str = "auto",
    kv: KvChoice = "auto",
    sequences: int = 1,
) -> Fit:
    """Plan how a bundle runs within a memory limit.

    memory: limit for the program, including mapped weights. Default: what is available on this machine.
    context_length: as in stem_edge.load.
    device: name of a device (stem_edge.apps.measuring.device_profiles): its memory, flash and bandwidth.
    bandwidth: bytes a second that the processor reads from memory. Without device and bandwidth,
        that of this machine is measured, which takes a second.
    engine, kv, sequences: as in stem_edge.load.

    Raises MemoryPlanError if the bundle does not fit, with the least memory that it needs;
    InputError, BundleError.
    """
    given = LoadOptions(
        threads=threads, context_length=context_length, engine=engine, kv=kv, sequences=sequences
    )
    stated = None if device is None else find_device(device)
    flash = None if stated is None else stated.flash  # without a device, tables are cached
    if memory is not None:
        allowed = parse_size(memory)
    else:
        allowed = available_memory() + own_memory() if stated is None else stated.memory
    bundle = open_or_make(path)
    chosen = choose_engine(bundle, engine)
    rates = bandwidth_of(stated, bandwidth, given.cpus)
    options = replace(given, memory=beside_mapped(bundle, chosen, given, allowed))
    # As load does, because the memory of the tokenizer counts.
    later = open_text(bundle, options).nbytes_to_come
    found, _, plan = loader_of_kv(bundle, chosen, options, later)
    needs = found.needs(plan.context_length)
    hits, source = _hits(bundle, needs.footprint)
    costs = found.step_costs if device is None and bandwidth is None else None
    step = costs.seconds if costs is not None else 0.0
    return Fit(needs, plan, needs.mapped, hits(plan.slots), source, rates, flash, step)


def beside_mapped(bundle: Bundle, engine: str, options: LoadOptions, memory: int) -> int:
    """Return `memory` minus the mapped weights that every token reads. Raises MemoryPlanError."""
    mapped = loader(bundle, engine, options).needs(1).mapped
    if mapped >= memory:
        raise MemoryPlanError(
            f"{bundle.path}: {format_size(memory)} are too little: every token reads {format_size(mapped)} of "
            "weights, at least which must stay in memory; allow more, or export with fewer bits"
        )
    return memory - mapped


def _hits(bundle: Bundle, footprint: Footprint) -> tuple[Callable[[int], float], str]:
    """Return a function from slots to hit rate, and where the rate comes from."""
    config = footprint.model
    if footprint.tables is None:
        return lambda slots: 1.0, "a dense model reads no rows"
    if not config.ngram_order and TOKEN_COUNTS in bundle.manifest.files:
        counted = read_counts(bundle.file(TOKEN_COUNTS), config.vocab_size)
        if counted is not None:
            manifest = bundle.manifest
            index = open_table_store(bundle.file(TABLES)).index if manifest.indexed else None
            counts = counts_of_records(counted, index, config.records)
            return partial(hit_rate, counts), "the bundle's token counts"
    whole = harmonic(config.records)  # without an array of all records, which are many with n-grams
    return lambda slots: harmonic(slots) / whole, "assumed: token frequencies by Zipf's law"


def harmonic(count: int) -> float:
    """Return the sum of 1 / n for n from 1 to `count` (Euler's approximation)."""
    return math.log(count) + 0.577216 + 1 / (2 * count) - 1 / (12 * count**2) if count else 0.0


def hit_rate(counts: Counts, slots: int) -> float:
    """Return the hit rate of a cache that holds the most frequent records, for random tokens."""
    ordered = np.sort(counts)[::-1].astype(np.float64)
    return float(ordered[:slots].sum() / max(1.0, ordered.sum()))
