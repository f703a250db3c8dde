"""Plans of a bundle for a device, without running it: bits, context, slots, expected figures.

The memory that is allowed is for everything that must stay there for fast decoding: anonymous memory,
and the mapped weights that every token reads. What is left goes to the row cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from stem_edge.bundle.footprint import Footprint, footprint_of
from stem_edge.bundle.manifest import TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.graph.kv import KvChoice
from stem_edge.measuring.memory.device_profiles import find_device
from stem_edge.measuring.planning.bandwidth import bandwidth_of
from stem_edge.measuring.planning.candidates import is_bundle, model_folder, of_checkpoint
from stem_edge.measuring.planning.hit_rates import (
    from_counts,
    record_ids,
    simulate,
    token_index,
    zipf_counts,
)
from stem_edge.measuring.planning.target import Fit, PlanTarget
from stem_edge.measuring.workload import read_ids
from stem_edge.runtime.backends.engines import ENGINES, choose_backbone
from stem_edge.runtime.backends.options import SMALL_KV, check_sequences
from stem_edge.runtime.backends.planner import USUAL_CONTEXT, contexts
from stem_edge.runtime.rows.emulated_flash import PROFILES
from stem_edge.runtime.rows.shards import FlashName
from stem_edge.system.memory import available_memory, memory_limit, usable_cpus
from stem_edge.tables.token_counts import counts_of_records, read_counts
from stem_edge.units import parse_size


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
    engine: str = "auto",
    repack: bool = False,
    kv: KvChoice = "auto",
    sequences: int = 1,
    tables: str | None = None,
) -> list[Fit]:
    """Return plans that fit, to run a bundle or to export a checkpoint, the recommended one first.

    memory: what the program may take. Default: what is available on this machine.
    context_length: default: chosen as stem_edge.load does, but shorter if few rows fit beside it.
        Figures are expected for a text that fills it, up to 4096 tokens.
    device: name of a device (stem_edge.measuring.memory.device_profiles): its memory, flash and bandwidth.
    bandwidth: bytes a second that the processor reads from memory. Without device and bandwidth,
        that of this machine is measured, which takes a second.
    text: a text, or token ids, like those that the model will see, for the hit rate.
    engine, repack, kv, sequences, tables: as in stem_edge.load; for a checkpoint, the engine "auto" is onnxruntime.

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
    _check(first, flash, context_length, threads, repack=repack)
    stated = None if device is None else find_device(device)
    if memory is not None:
        allowed = parse_size(memory)
    else:
        allowed = available_memory() if stated is None else stated.memory
    flash = flash or (stated.flash if stated else None)
    lengths = [context_length] if context_length else contexts(first.model.max_context)
    hits, source = _hits(bundle, first, text)
    limit = memory_limit() if stated is None else stated.memory
    target = PlanTarget(
        root,
        bundle,
        memory=allowed,
        limit=limit,
        contexts=lengths,
        bandwidth=bandwidth_of(stated, bandwidth, threads or usable_cpus()),
        hits=hits,
        hit_source=source,
        flash=flash,
        repack=repack,
        sequences=sequences,
    )
    if kv != "auto" or first.caches.obstacle(SMALL_KV):
        return target.fits([footprint.with_kv(kv) for footprint in footprints])
    with suppress(MemoryPlanError):
        found = target.fits(footprints)
        if found[0].plan.context_length >= min(USUAL_CONTEXT, lengths[0]):
            return found
    return target.fits([footprint.with_kv(SMALL_KV) for footprint in footprints])


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
    ENGINES[footprint.engine].check_lacks({"repack": repack})


def _hits(
    bundle: Bundle | None, footprint: Footprint, text: str | Path | None
) -> tuple[Callable[[int], float], str]:
    """Return slots -> hit rate, by the best that is known of texts to come, and its source."""
    config, warm = footprint.model, None
    if footprint.tables is None:
        return lambda slots: 1.0, "a dense model reads no rows"
    if bundle is not None and not config.ngram_order and TOKEN_COUNTS in bundle.manifest.files:
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
