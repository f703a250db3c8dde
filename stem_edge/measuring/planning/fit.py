"""Plans of a bundle for a device, without running it: bits, context, slots, expected figures.

The memory that is allowed is for everything that must stay there for fast decoding: anonymous memory,
and the mapped weights that every token reads. What is left goes to the row cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stem_edge.bundle.footprint import Footprint, footprint_of, kv_obstacle
from stem_edge.bundle.manifest import TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.prefill_check import crowding
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.formats import BackboneFormat, GgufFormat
from stem_edge.graph.kv import KvChoice
from stem_edge.measuring.memory.device_profiles import Device, find_device
from stem_edge.measuring.planning.candidates import is_bundle, model_folder, of_checkpoint
from stem_edge.measuring.planning.hit_rates import (
    from_counts,
    record_ids,
    simulate,
    token_index,
    zipf_counts,
)
from stem_edge.measuring.planning.network import Network, parse_network
from stem_edge.measuring.planning.predict import (
    OBSERVED,
    NeedsAt,
    Prediction,
    Usage,
    predict,
    read_in_place,
    tokenizer_nbytes,
)
from stem_edge.measuring.planning.rates import derived_rates, measure_rates
from stem_edge.measuring.planning.timing import Rates
from stem_edge.measuring.run.workload import read_ids
from stem_edge.runtime.backends.context_choice import USUAL_CONTEXT, contexts, leaves_room
from stem_edge.runtime.backends.engines import choose_backbone
from stem_edge.runtime.backends.ggml.loader import ggml_needs
from stem_edge.runtime.backends.memory_plan import MemoryPlan, Needs
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.options import SMALL_KV, EngineChoice, check_sequences
from stem_edge.runtime.backends.planner import Planner
from stem_edge.runtime.rows.emulated_flash import PROFILES, FlashName
from stem_edge.runtime.rows.tier_file import file_slot_nbytes
from stem_edge.system.memory import available_memory, memory_limit, usable_cpus
from stem_edge.tables.token_counts import counts_of_records, read_counts
from stem_edge.units import format_size, parse_size

WANTED_SLOTS = 1024  # if there is no room for these beside a context, a shorter one is better
LEAST_BANDWIDTH = 10**8  # less must be a typing error


@dataclass(frozen=True)
class Fit:
    """Plan and expected figures of a model on a device."""

    needs: Needs  # at the context that was chosen
    plan: MemoryPlan
    hit_source: str  # of the hit rate, in words
    rates_source: str  # of the speed of memory, in words
    flash: FlashName | None
    network: Network | None  # to the tables; None: they are on flash
    prediction: Prediction

    @property
    def footprint(self) -> Footprint:
        """Sizes of the bundle's parts."""
        return self.needs.footprint

    @property
    def types(self) -> BackboneFormat | GgufFormat:
        """Types of the weights."""
        return self.footprint.backbone

    @property
    def tables(self) -> str:
        """Type of the rows; empty for a dense model."""
        return self.footprint.tables.row_type if self.footprint.tables else ""

    @property
    def load_memory(self) -> int:
        """Bytes to give to stem_edge.load(memory=) or --memory."""
        return self.plan.total

    @property
    def mapped(self) -> int:
        """Bytes of weights that every token reads in place, in mapped files."""
        return read_in_place(self.needs)

    @property
    def memory(self) -> int:
        """Bytes of expected anonymous memory and of those weights."""
        return self.prediction.anonymous + self.mapped


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
    kv: KvChoice = "auto",
    sequences: int = 1,
    network: str | None = None,
    disk_tier: int | str | None = None,
    tables: str | None = None,
) -> list[Fit]:
    """Return plans that fit, to run a bundle or to export a checkpoint, the recommended one first.

    memory: what the program may take. Default: what is available on this machine.
    context_length: default: chosen as stem_edge.load does, but shorter if few rows fit beside it.
        Figures are expected for a text that fills it, up to 4096 tokens.
    device: name of a device (stem_edge.measuring.memory.device_profiles): its memory, flash and bandwidth.
    bandwidth: bytes a second that the processor reads from memory. Without device and bandwidth,
        the rates of this machine are measured, which takes a second or two.
    text: a text, or token ids, like those that the model will see, for the hit rate.
    network: latency and bandwidth to tables that are elsewhere, like "20ms,100MB"; flash then holds
        the disk tier.
    engine, repack, kv, sequences, tables, disk_tier: as in stem_edge.load; for a checkpoint, the engine "auto" is onnxruntime.

    Raises MemoryPlanError, which names the least that is needed, if nothing fits; InputError,
    BundleError, CheckpointError.
    """
    root = model_folder(path)
    bundle = open_bundle(root, tables) if is_bundle(root) else None
    if bundle is None:
        footprints = of_checkpoint(root, engine)
    else:
        footprints = [footprint_of(bundle.manifest, choose_backbone(bundle, engine))]
    first = footprints[0].with_kv(kv)
    check_sequences(sequences)
    over = parse_network(network, disk_tier)
    _check(first, flash, context_length, threads, repack=repack)
    stated = None if device is None else find_device(device)
    if memory is not None:
        allowed = parse_size(memory)
    else:
        allowed = available_memory() if stated is None else stated.memory
    flash = flash or (stated.flash if stated else None)
    lengths = [context_length] if context_length else contexts(first.model.max_context)
    rates_of = partial(
        _rates, device=stated, bandwidth=bandwidth, threads=threads or usable_cpus(), repack=repack
    )
    hits, source = _hits(bundle, first, text)
    limit = memory_limit() if stated is None else stated.memory
    target = _Target(
        *(
            root,
            bundle,
            allowed,
            limit,
            lengths,
            rates_of,
            hits,
            source,
            flash,
            over,
            repack,
            sequences,
        )
    )
    if kv != "auto" or kv_obstacle(first.model, first.backbone, SMALL_KV):
        return target.fits([footprint.with_kv(kv) for footprint in footprints])
    with suppress(MemoryPlanError):
        found = target.fits(footprints)
        if found[0].plan.context_length >= min(USUAL_CONTEXT, lengths[0]):
            return found
    return target.fits([footprint.with_kv(SMALL_KV) for footprint in footprints])


@dataclass(frozen=True)
class _Target:
    """Machine and use that plans are made for."""

    root: Path
    bundle: Bundle | None
    memory: int
    limit: int  # bytes that the device has, of which `memory` may be a part
    contexts: list[int]
    rates_of: Callable[[Footprint], Rates]
    hits: Callable[[int], float]
    hit_source: str
    flash: FlashName | None
    network: Network | None
    repack: bool
    sequences: int

    def fits(self, footprints: Sequence[Footprint]) -> list[Fit]:
        """Plan for each of the possible bundles that fits. Raises MemoryPlanError if none does."""
        rates, found, refused = self.rates_of(footprints[0]), list[Fit](), list[MemoryPlanError]()
        for footprint in footprints:
            try:
                found.append(self.fit(footprint, rates))
            except MemoryPlanError as error:
                refused.append(error)
        if not found:
            raise refused[-1]  # the last, because it needs least
        return found

    def fit(self, footprint: Footprint, rates: Rates) -> Fit:
        """Plan for one of the possible bundles. Raises MemoryPlanError."""
        tokenizer, prepared = tokenizer_nbytes(self.root), _will_be_prepared(footprint, self.bundle)
        prefill = footprint.prefill_nbytes > 0 and not crowding(footprint, self.limit)
        needs_at = partial(
            _needs, footprint, prepared=prepared, prefill=prefill, repack=self.repack
        )
        plan = _plan(
            self.root, needs_at, self.memory, self.contexts, tokenizer, sequences=self.sequences
        )
        context, hit_rate = plan.context_length, self.hits(plan.slots)
        tables, tier = footprint.table_format, 0.0
        if self.network is not None and tables is not None:
            nbytes = file_slot_nbytes(tables.tables)
            tier = self.network.tier_share(self.hits, plan.slots, nbytes)
        used = min(context, USUAL_CONTEXT)  # half of it by a prompt, the other half decoded
        usage = Usage(
            *(used // 2, used - used // 2, min(used, 500), plan.slots, hit_rate),
            *(self.sequences, tier),
        )
        media = self.flash, self.network
        expected = predict(needs_at, plan, usage, rates, *media, tokenizer_nbytes=tokenizer)
        return Fit(needs_at(context), plan, self.hit_source, rates.source, *media, expected)


def fit_on_device(bundle: Bundle, needs_at: NeedsAt, memory: int, context_length: int) -> int:
    """Return the bytes to give to load as `memory` if a device has so much for one program.

    Raises MemoryPlanError as fit does.
    """
    tokenizer = tokenizer_nbytes(bundle.path)
    words = "for one program", "take a larger device"
    return _plan(bundle.path, needs_at, memory, [context_length], tokenizer, *words).total


def _check(
    footprint: Footprint,
    flash: FlashName | None,
    context_length: int | None,
    threads: int | None,
    *,
    repack: bool,
) -> None:
    """Raise InputError for arguments out of range."""
    most = footprint.model.max_context
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; expected at least 1")
    if flash is not None and flash not in PROFILES:
        raise InputError(f"flash is {flash!r}; expected one of {', '.join(PROFILES)}")
    if context_length is not None and not 1 <= context_length <= most:
        raise InputError(f"context_length is {context_length}; this model takes 1 to {most}")
    if repack and footprint.engine != "ggml":
        raise InputError(
            "repack is for ggml, and this plan is for onnxruntime; leave it out or choose ggml"
        )


def _rates(
    footprint: Footprint,
    device: Device | None,
    bandwidth: int | str | None,
    threads: int,
    *,
    repack: bool,
) -> Rates:
    """Return rates derived from a bandwidth that is given or stated, else measure them."""
    if bandwidth is not None:
        if parse_size(bandwidth) < LEAST_BANDWIDTH:
            raise InputError(
                f"bandwidth is {bandwidth} bytes a second, which is too little; write for example 17GB"
            )
        return derived_rates(parse_size(bandwidth), "as given", footprint)
    if device is not None:
        return derived_rates(device.bandwidth, f"stated for {device.name}", footprint)
    return measure_rates(footprint, threads, repack=repack)


def _hits(
    bundle: Bundle | None, footprint: Footprint, text: str | Path | None
) -> tuple[Callable[[int], float], str]:
    """Return slots -> hit rate, by the best that is known of texts to come, and its source."""
    config, warm = footprint.model, None
    if footprint.tables is None:
        return lambda slots: 1.0, "a dense model reads no rows"
    if bundle is not None and TOKEN_COUNTS in bundle.manifest.files:
        counted = read_counts(bundle.file(TOKEN_COUNTS), config.vocab_size)
        if counted is not None:
            warm = counts_of_records(counted, token_index(bundle), config.records)
    if text is not None:
        if bundle is None:
            raise InputError("a text needs a bundle's tokenizer; export the checkpoint first")
        ids = record_ids(bundle, np.asarray(read_ids(Path(text), bundle), np.int64))
        return (
            lambda slots: simulate(ids, config.records, slots, warm)[0],
            f"the row cache simulated on {text}",
        )
    if warm is not None:
        return partial(from_counts, warm), "the bundle's token counts"
    zipf = zipf_counts(config.records)
    return partial(from_counts, zipf), "assumed: token frequencies by Zipf's law"


def _will_be_prepared(footprint: Footprint, bundle: Bundle | None) -> bool:
    """Return whether load will find or make a prepared backbone."""
    if footprint.engine != "onnxruntime":
        return False
    from stem_edge.runtime.backends.onnxruntime.prepacked import LEAST_NBYTES, place

    if bundle is not None:
        return place(bundle, None).is_worth_it
    return footprint.backbone_nbytes + footprint.prefill_nbytes >= LEAST_NBYTES


def _needs(
    footprint: Footprint, context: int, *, prepared: bool, prefill: bool, repack: bool
) -> Needs:
    """Return the memory needs of the engine, with all processors of this machine."""
    if footprint.engine == "ggml":
        return ggml_needs(footprint, context, usable_cpus(), repack=repack)
    return cpu_needs(footprint, context, usable_cpus(), prepared=prepared, prefill=prefill)


def _plan(
    path: Path,
    needs_at: NeedsAt,
    memory: int,
    contexts: list[int],
    tokenizer: int,
    whose: str = "of memory",
    advice: str = "allow more",
    *,
    sequences: int = 1,
) -> MemoryPlan:
    """Return the plan with the longest context that leaves room for rows. Raises MemoryPlanError.

    contexts: in descending order.
    """
    for context in contexts:
        needs = needs_at(context)
        planner = Planner(needs, OBSERVED[needs.footprint.engine].generating + tokenizer, sequences)
        anonymous = memory - read_in_place(needs)
        smallest = planner.least(anonymous)
        if smallest.total <= anonymous:
            plan = planner.filled(smallest, anonymous)
            useful = plan.slots >= min(WANTED_SLOTS, planner.records)
            if context > USUAL_CONTEXT:
                useful &= leaves_room(plan, anonymous)
            if useful or context == contexts[-1]:
                return plan
    least = format_size(smallest.total + memory - anonymous)
    raise MemoryPlanError(
        f"{path}: {format_size(memory)} {whose} are too little: with a context of {context} tokens, "
        f"at least {least} must stay in memory, including the weights that every token reads; "
        f"{advice}, shorten the context, or export with fewer bits"
    )
