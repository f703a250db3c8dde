"""From a bundle to a model that can generate: choose, plan, open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Unpack

import numpy as np

from stem_edge.bundle.manifest import TABLES, TOKENIZER, Bundle, open_bundle
from stem_edge.runtime.backends.engines import (
    ENGINES,
    EngineLoader,
    choose_engine,
    first_that_runs,
    loaders,
)
from stem_edge.runtime.backends.interface import Backend
from stem_edge.runtime.backends.options import LoadOptions, MoreKeywords, OtherKeywords, Providers
from stem_edge.runtime.backends.plan import Ask, MemoryPlan, Needs, plan_memory
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.first_load.trial import try_first
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.flash import open_flash
from stem_edge.runtime.rows.host_tier import HostTier
from stem_edge.runtime.rows.prefetch import Prefetcher, Rows
from stem_edge.runtime.rows.slots import Slots
from stem_edge.runtime.rows.store import ReadMode, open_store
from stem_edge.runtime.rows.warm import expected_records, fill, keep_counts
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.system.memory import available_memory, own_memory, raise_out_of_memory


def load(
    path: str | Path,
    memory: int | str | None = None,
    threads: int | None = None,
    providers: Providers = None,
    context_length: int | None = None,
    reads: ReadMode = "pread",
    **more: Unpack[MoreKeywords],
) -> Model:
    """Load a bundle.

    memory: limit for the anonymous memory and swap of this process, in bytes or like "600MB"; the
        row cache gets what the rest leaves. Default: half of what the machine and its cgroups leave,
        with a row cache of up to 256 MiB.
    threads: of the backbone. Default: the CPUs this process may use.
    providers: of onnxruntime: the execution provider that runs the backbone: "cpu", "cuda", "webgpu",
        "coreml", "openvino", or another by onnxruntime's name for it; with options as
        [("cuda", {"device_id": 1})]. It must run every operator, or "cpu" must be last in the list
        to take the rest. "auto": the first accelerator there is. Default: the CPU.
    context_length: tokens of prompt and answer together. Default: the model's own, up to 4096.
    reads: "pread" turns a failing disk into an error; "mmap" may kill the process instead.
    engine: "onnxruntime" or "ggml". Default, "auto": the first of them that the bundle has a
        backbone for and that is installed; Model.plan.engine says which it was.
    device_memory: limit for the memory of the provider's device, in bytes or like "2GB": weights, KV
        cache, activations and slots, which lie there then. Default: what an NVIDIA driver says is
        free; elsewhere none, and slots as without a limit for memory. With the CPU, a part of its
        memory plays the device.
    provider_libraries: plug-in providers by name and path of their library, which is code that you
        trust; those that come as Python packages are found.
    slots: of the row cache, instead of as many as fit.
    host_slots: with a device: so many records are kept in host memory, between flash and the
        device, instead of as many as `memory` leaves room for.
    resident: read all tables into memory first.
    overlap: read rows ahead in a thread; without it the same tokens come out, more slowly.
    prefill_graph: of onnxruntime: whether the bundle's int8 graph takes prompts. Default: if it is as
        exact here as the bundle says, which a trial measures, and was not the slower one when the
        backbone was prepared.
    prepare: of onnxruntime: rearrange a large backbone for this processor at the first load, and
        keep that.
    repack: of ggml: rearrange the matrices that it has faster kernels for, in memory: copies of
        them, which the memory plan counts ("weights"), beside pages of the file that are not read.
    warm_start: fill the row cache with the tokens that are used most, and keep count of them.
    cache_dir: where both are kept. Default: the user's cache folder.
    trial: load a bundle that is new on this machine in a process of its own first, within limits,
        and keep there what came of it: a file that crashes native code then is an error.
    emulate_flash: delay reads as slower flash would: "nvme", "ufs4", "ufs2", "emmc", "sdcard".
    progress: show a progress bar on stderr while preparing. Default: if that is a terminal.

    Raises BundleError, MemoryPlanError, OutOfMemoryError, BackendError, InputError.
    """
    options = LoadOptions(
        memory=memory,
        threads=threads,
        providers=providers,
        context_length=context_length,
        reads=reads,
        **more,
    )
    try:
        return _load(open_bundle(path), options)
    except MemoryError as error:
        advice = "load with a lower memory or a smaller context_length, or free some"
        raise_out_of_memory(error, "to load the model", advice)


def _load(bundle: Bundle, options: LoadOptions) -> Model:
    chosen = choose_engine(bundle, options.engine)
    context, ways = options.context(bundle), loaders(bundle, chosen, options)
    verdict = None
    if options.trial:  # before any native code of this process sees the bundle
        backbone = ENGINES[chosen].backbone
        verdict = try_first(bundle, backbone, options.cache_dir, options.progress)

    def assemble(loader: EngineLoader) -> Model:
        loader.prepare(verdict)
        text = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
        plan = _plan(bundle, chosen, loader.needs(context), options)
        return _assemble(bundle, loader, plan, text, options)

    return first_that_runs(bundle, ways, assemble)


def _plan(bundle: Bundle, engine: str, needs: Needs, options: LoadOptions) -> MemoryPlan:
    ask = Ask(options.memory, options.row_slots(bundle), options.host_slots)
    plan = plan_memory(bundle.path, needs, ask, own_memory(), available_memory())
    return dataclasses.replace(plan, engine=engine)


def _assemble(
    bundle: Bundle, loader: EngineLoader, plan: MemoryPlan, text: TextCodec, options: LoadOptions
) -> Model:
    """Open what the plan counts."""
    format, overlap, cache_dir = bundle.manifest.table_format, options.overlap, options.cache_dir

    def model(backend: Backend, rows: Rows, on_close: Callable[[], None] | None = None) -> Model:
        chunk = min(plan.chunk_tokens, loader.step_tokens)  # known once the backbone is open
        return Model(bundle, Engine(backend, rows, chunk, overlap=overlap), plan, text, on_close)

    if format is None:
        return model(loader.open(None), Rows())
    with ExitStack() as opened:
        flash = open_flash(options.emulate_flash)
        tables = open_store(bundle.file(TABLES), format, options.reads, flash)
        opened.enter_context(tables)
        storage = loader.make_slots(format.tables, plan.slots)
        cache = RowCache(storage)
        store = HostTier(tables, plan.host_slots) if plan.host_slots else tables
        rows = Prefetcher(store, cache, overlap=overlap)
        opened.callback(rows.close)
        wanted = np.zeros(0, np.int64)
        if options.warm_start and not options.resident:
            wanted = expected_records(bundle, rows, cache_dir)

        def fill_slots() -> None:
            if options.resident:
                rows.fill(np.arange(plan.slots), plan.chunk_tokens)
            fill(rows, wanted, plan.chunk_tokens)

        backend = _open_and_fill(loader, storage, fill_slots)
        keep = (lambda: keep_counts(bundle, cache, cache_dir)) if options.warm_start else None
        loaded = model(backend, rows, keep)
        opened.pop_all()
    return loaded


def memory_plan(
    path: str | Path,
    memory: int | str | None = None,
    context_length: int | None = None,
    **others: Unpack[OtherKeywords],
) -> MemoryPlan:
    """The memory plan that `load` would follow here and now with these keywords. Loads nothing.

    prepare: as if the backbone were prepared, which a first load does. On an accelerator, as if it
        ran the first variant of the graphs that is tried.
    """
    options = LoadOptions(memory=memory, context_length=context_length, **others)
    bundle = open_bundle(path)
    chosen = choose_engine(bundle, options.engine)
    TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    needs = loaders(bundle, chosen, options)[0].needs(options.context(bundle))
    return _plan(bundle, chosen, needs, options)


def _open_and_fill(loader: EngineLoader, slots: Slots, fill_slots: Callable[[], None]) -> Backend:
    """Rows are read while graphs are loaded: nothing looks at the slots before both are done."""
    with ThreadPoolExecutor(1, thread_name_prefix="stem-edge-warm") as thread:
        filling = fill_slots
        with suppress(RuntimeError):  # no thread can start: then one after the other
            if loader.fills_while_opening:
                filling = thread.submit(fill_slots).result
        backend = loader.open(slots)
        try:
            filling()
        except BaseException:
            backend.close()
            raise
    return backend
