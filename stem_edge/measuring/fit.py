"""Plans a bundle for a device, without running it: bits, context, slots, and what to expect.

One memory figure is shared by everything that must stay in memory for decoding to be fast: anonymous
memory, and the mapped weights that every token reads. What is left beside both goes to the row cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stem_edge.bundle import TOKEN_COUNTS, TOKENIZER, Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.footprint import Footprint, footprint_of
from stem_edge.formats import BackboneFormat, EngineName, GgufFormat
from stem_edge.measuring.candidates import of_bundle, of_checkpoint
from stem_edge.measuring.devices import find_device
from stem_edge.measuring.hit_rates import (
    from_counts,
    record_ids,
    simulate,
    token_index,
    zipf_counts,
)
from stem_edge.measuring.models import is_bundle
from stem_edge.measuring.predict import GENERATING_NBYTES, Prediction, predict
from stem_edge.measuring.rates import Rates, derived_rates, measure_rates
from stem_edge.measuring.usage import Usage
from stem_edge.measuring.workload import read_ids
from stem_edge.runtime.flash import PROFILES, FlashName
from stem_edge.runtime.loading_ggml import ggml_needs
from stem_edge.runtime.machine import available_memory, usable_cpus
from stem_edge.runtime.needs_ort import cpu_needs
from stem_edge.runtime.options import DEFAULT_CONTEXT, EngineChoice
from stem_edge.runtime.plan import MemoryPlan, Needs, Planner
from stem_edge.token_counts import Counts, count_tokens, counts_of_records, read_counts
from stem_edge.units import format_size, parse_size

# Contexts that are tried where none was asked for, and so many slots that a longer one is worth them.
CONTEXTS = (DEFAULT_CONTEXT, 2048, 1024, 512, 256, 128)
WANTED_SLOTS = 1024
LEAST_BANDWIDTH = 10**8  # less is a slip of the keyboard
# A tokenizer in memory over its tokenizer.json, of vocabularies from 2,000 to 128,000 tokens.
MEMORY_OVER_TOKENIZER = 12


@dataclass(frozen=True)
class Target:
    """What a bundle is planned for. Sizes in bytes."""

    memory: int  # for anonymous memory and the weights that every token reads
    flash: FlashName | None  # None: records come out of the page cache
    context_length: int | None
    rates: Rates


@dataclass(frozen=True)
class Way:
    """How a bundle is loaded, as far as its memory depends on that."""

    prepared: bool = False  # of onnxruntime
    repack: bool = False  # of ggml

    def mapped_nbytes(self, footprint: Footprint) -> int:
        """Weights that every token reads, in place in mapped files."""
        if footprint.engine == "ggml":
            return footprint.step_nbytes - (footprint.repacked_nbytes if self.repack else 0)
        return footprint.step_nbytes if self.prepared else 0

    def needs(self, footprint: Footprint, context: int) -> Needs:
        """What the engine needs then, with all processors of this machine."""
        if footprint.engine == "ggml":
            return ggml_needs(footprint, context, usable_cpus(), repack=self.repack)
        prefill = footprint.prefill_nbytes > 0
        return cpu_needs(footprint, context, usable_cpus(), prepared=self.prepared, prefill=prefill)


@dataclass(frozen=True)
class Fit:
    """One way to run a model on a device."""

    types: BackboneFormat | GgufFormat
    tables: str  # type of the rows; empty for a dense model
    footprint: Footprint
    plan: MemoryPlan
    way: Way
    mapped: int  # weights that every token reads in place in mapped files
    load_memory: int  # what to give to stem_edge.load(memory=) or --memory
    memory: int  # expected: anonymous and mapped weights
    hit_source: str  # where the hit rate comes from, in words
    rates_source: str  # where the speed of memory comes from, in words
    flash: FlashName | None
    prediction: Prediction


@dataclass(frozen=True)
class Tokens:
    """What is known of the text that the model will see, in numbers of records."""

    ids: np.ndarray | None
    counts: Counts
    source: str
    warm: Counts | None = None  # what load fills the row cache with


def fit(
    path: str | Path,
    memory: int | str | None = None,
    *,
    flash: FlashName | None = None,
    context_length: int | None = None,
    device: str | None = None,
    bandwidth: int | str | None = None,
    text: str | Path | None = None,
    threads: int | None = None,
    engine: EngineChoice = "auto",
    repack: bool = False,
) -> list[Fit]:
    """Ways to run a bundle, or to export a checkpoint, that fit; the one to take first.

    memory: what the program may take. Default: what this machine leaves.
    device: a device by name (stem_edge.measuring.devices), with its memory, flash and bandwidth.
    bandwidth: bytes a second that the processor reads from memory. Without device and bandwidth the
        rates of this machine are measured, which takes a second or two.
    text: a text, or token ids, like those that the model will see: for the hit rate.
    engine: that runs it, as of stem_edge.load; of a checkpoint, "auto" is onnxruntime.
    repack: of ggml, as of stem_edge.load.

    Raises MemoryPlanError, naming the least that is needed, if nothing fits; InputError,
    BundleError, CheckpointError.
    """
    root = Path(path)
    bundle = open_bundle(root) if is_bundle(root) else None
    models = of_checkpoint(root, engine) if bundle is None else [of_bundle(bundle, engine)]
    if repack and models[0].engine != "ggml":
        raise InputError("repack belongs to ggml, and this is planned for onnxruntime")
    target = _target(
        memory, flash, context_length, device, bandwidth, models[0], threads, repack=repack
    )
    tokens = _tokens(root, models[0].model, text)
    tokenizer = tokenizer_nbytes(root)
    found = [
        _fit(model, target, tokens, tokenizer, Way(will_be_prepared(model, bundle, None), repack))
        for model in models
    ]
    fits = [one for one in found if isinstance(one, Fit)]
    if not fits:
        least = min(one for one in found if isinstance(one, int))
        raise MemoryPlanError(
            f"{root}: {format_size(target.memory)} of memory are too little: with a context of "
            f"{context_length or CONTEXTS[-1]} tokens, at least {format_size(least)} must stay in "
            "memory, the weights that every token reads included; allow more, shorten the context, "
            "or export with fewer bits"
        )
    return fits


def _target(
    memory: int | str | None,
    flash: FlashName | None,
    context_length: int | None,
    device: str | None,
    bandwidth: int | str | None,
    footprint: Footprint,
    threads: int | None,
    *,
    repack: bool,
) -> Target:
    known = find_device(device) if device is not None else None
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; expected at least 1")
    if flash is not None and flash not in PROFILES:
        raise InputError(f"flash is {flash!r}; expected one of {', '.join(PROFILES)}")
    most = footprint.model.max_context
    if context_length is not None and not 1 <= context_length <= most:
        raise InputError(f"context_length is {context_length}; this model takes 1 to {most}")
    if bandwidth is not None and parse_size(bandwidth) < LEAST_BANDWIDTH:
        raise InputError(f"bandwidth is {bandwidth} bytes a second; write for example 17GB")
    if bandwidth is not None:
        rates = derived_rates(parse_size(bandwidth), "as given")
    elif known is not None:
        rates = derived_rates(known.bandwidth, f"stated for {known.name}")
    else:
        rates = measure_rates(footprint, threads or usable_cpus(), repack=repack)
    here = known.memory if known is not None else available_memory()
    return Target(
        parse_size(memory) if memory is not None else here,
        flash or (known.flash if known else None),
        context_length,
        rates,
    )


def _tokens(root: Path, config: ModelConfig, text: str | Path | None) -> Tokens:
    """The best that is known: a text, the counts in a bundle, else an assumption."""
    bundle = open_bundle(root) if is_bundle(root) else None
    warm = None
    if bundle is not None and TOKEN_COUNTS in bundle.manifest.files:
        counted = read_counts(bundle.file(TOKEN_COUNTS), config.vocab_size)
        if counted is not None:
            warm = counts_of_records(counted, token_index(bundle), config.records)
    if text is not None:
        if bundle is None:
            raise InputError("a text needs a bundle's tokenizer; export the checkpoint first")
        ids = record_ids(bundle, np.asarray(read_ids(Path(text), bundle), np.int64))
        counts = count_tokens(ids, config.records)
        return Tokens(ids, counts, f"the row cache simulated on {text}", warm)
    if warm is not None:
        return Tokens(None, warm, "the bundle's token counts")
    return Tokens(None, zipf_counts(config.records), "assumed: token frequencies by Zipf's law")


def tokenizer_nbytes(root: Path) -> int:
    """What a bundle's tokenizer will take in memory; of a checkpoint nobody knows."""
    if not is_bundle(root):
        return 0
    return int(MEMORY_OVER_TOKENIZER * (root / TOKENIZER).stat().st_size)


def will_be_prepared(
    footprint: Footprint, bundle: Bundle | None, cache_dir: str | Path | None
) -> bool:
    """Whether load will find or make a prepared backbone, which onnxruntime alone has."""
    if footprint.engine != "onnxruntime":
        return False
    from stem_edge.runtime.prepared import LEAST_NBYTES, find

    large = footprint.backbone_nbytes + footprint.prefill_nbytes >= LEAST_NBYTES
    return large or (bundle is not None and find(bundle, cache_dir) is not None)


def _fit(
    footprint: Footprint, target: Target, tokens: Tokens, tokenizer: int, way: Way
) -> Fit | int:
    """The plan for one footprint, or the least memory that it needs."""
    contexts = [target.context_length] if target.context_length else _contexts(footprint)
    mapped, least = way.mapped_nbytes(footprint), 0
    process = GENERATING_NBYTES[footprint.engine] + tokenizer
    for context in contexts:
        planner = Planner(way.needs(footprint, context), process)
        anonymous = target.memory - mapped
        smallest = planner.least(anonymous)
        least = smallest.total + mapped
        if smallest.total <= anonymous:
            plan = planner.filled(smallest, anonymous)
            enough = plan.slots >= min(WANTED_SLOTS, footprint.model.records)
            if footprint.tables is None or enough or context == contexts[-1]:
                return _described(footprint, plan, target, tokens, way, tokenizer)
    return least


def _contexts(footprint: Footprint) -> list[int]:
    return sorted({min(one, footprint.model.max_context) for one in CONTEXTS}, reverse=True)


def _described(
    footprint: Footprint,
    plan: MemoryPlan,
    target: Target,
    tokens: Tokens,
    way: Way,
    tokenizer: int,
) -> Fit:
    config, tables = footprint.model, footprint.tables
    plan_slots = min(plan.slots, config.records)
    hits = 1.0
    if tables is not None and tokens.ids is not None:
        hits, _ = simulate(tokens.ids, config.records, plan_slots, tokens.warm)
    elif tables is not None:
        hits = from_counts(tokens.counts, plan_slots)
    context = plan.context_length
    usage = Usage(context // 2, context - context // 2, min(context, 500), plan_slots, hits)
    prediction = predict(
        footprint,
        plan,
        usage,
        target.rates,
        PROFILES[target.flash] if target.flash else None,
        prepared=way.prepared,
        prefill=True,
        repack=way.repack,
        tokenizer_nbytes=tokenizer,
    )
    mapped = way.mapped_nbytes(footprint)
    return Fit(
        types=footprint.backbone,
        tables=tables.row_type if tables else "",
        footprint=footprint,
        plan=plan,
        way=way,
        mapped=mapped,
        load_memory=plan.total,
        memory=prediction.anonymous + mapped,
        hit_source=tokens.source if tables else "a dense model reads no rows",
        rates_source=target.rates.source,
        flash=target.flash,
        prediction=prediction,
    )


def fit_on_device(
    bundle: Bundle, engine: EngineName, memory: int, context_length: int, way: Way
) -> int:
    """What to give to load as `memory` on a device that has so much for one program, in bytes.

    Raises MemoryPlanError as fit does.
    """
    footprint = footprint_of(bundle.manifest, engine)
    target = Target(memory, None, context_length, Rates(1.0, 1.0, 1.0, 0.0, ""))
    tokens = Tokens(None, zipf_counts(footprint.model.records), "")
    found = _fit(footprint, target, tokens, tokenizer_nbytes(bundle.path), way)
    if isinstance(found, int):
        raise MemoryPlanError(
            f"{bundle.path}: {format_size(memory)} for one program are too little: at least "
            f"{format_size(found)} must stay in memory, the weights that every token reads "
            "included; take a larger device, shorten the context, or export with fewer bits"
        )
    return found.load_memory
