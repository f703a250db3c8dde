"""From a bundle to a model that can generate: choose, plan, open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from stem_edge.bundle import TABLES, TOKENIZER, Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backend import Backend
from stem_edge.runtime.cache import RowCache
from stem_edge.runtime.device_options import DeviceOptions
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.engines import (
    EngineChoice,
    EngineLoader,
    LoaderOptions,
    Providers,
    check_options,
    choose_engine,
    plan_on_device,
    with_loader,
)
from stem_edge.runtime.flash import EmulatedFlash, FlashName, open_flash
from stem_edge.runtime.host_tier import HostTier
from stem_edge.runtime.machine import (
    available_memory,
    own_memory,
    raise_out_of_memory,
    usable_cpus,
)
from stem_edge.runtime.model import Model
from stem_edge.runtime.plan import Loading, MemoryPlan, plan_memory
from stem_edge.runtime.prefetch import NoRows, Prefetcher
from stem_edge.runtime.slots import Slots
from stem_edge.runtime.store import ReadMode, open_store
from stem_edge.runtime.text import TextCodec
from stem_edge.runtime.warm import expected_records, fill, keep_counts

# The KV cache is memory: a model built for 128k tokens must not take gigabytes unasked.
DEFAULT_CONTEXT = 4096
P = ParamSpec("P")
T = TypeVar("T")


class LoadOptions(DeviceOptions, total=False):
    """Arguments of `load` but for the bundle; what is left out has its default there."""

    memory: int | str | None
    threads: int | None
    engine: EngineChoice
    context_length: int | None
    reads: ReadMode
    slots: int | None
    resident: bool
    overlap: bool
    prefill_graph: bool | None
    prepare: bool
    repack: bool
    warm_start: bool
    cache_dir: str | None
    trial: bool
    emulate_flash: FlashName | None


def _reporting_memory(load: Callable[P, T]) -> Callable[P, T]:
    @wraps(load)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return load(*args, **kwargs)
        except MemoryError as error:
            advice = "load with a lower memory or a smaller context_length, or free some"
            raise_out_of_memory(error, "to load the model", advice)

    return reporting


@_reporting_memory
def load(
    path: str | Path,
    memory: int | str | None = None,
    threads: int | None = None,
    providers: Providers = None,
    context_length: int | None = None,
    reads: ReadMode = "pread",
    *,
    engine: EngineChoice = "auto",
    device_memory: int | str | None = None,
    provider_libraries: Mapping[str, str | Path] | None = None,
    slots: int | None = None,
    host_slots: int | None = None,
    resident: bool = False,
    overlap: bool = True,
    prefill_graph: bool | None = None,
    prepare: bool = True,
    repack: bool = False,
    warm_start: bool = True,
    cache_dir: str | Path | None = None,
    trial: bool = True,
    emulate_flash: FlashName | None = None,
    progress: bool | None = None,
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
    bundle = open_bundle(path)
    chosen = choose_engine(bundle, engine)
    loading = Loading(
        context_length=_context(bundle, context_length),
        process=0,
        engine=chosen,
        slots=_slots(bundle, slots, resident=resident),
        threads=_threads(threads),
        host_slots=_host_slots(host_slots),
    )
    options = LoaderOptions(
        threads=loading.threads,
        providers=providers,
        provider_libraries=provider_libraries,
        device_memory=device_memory,
        prefill_graph=prefill_graph,
        prepare=prepare,
        repack=repack,
        cache_dir=cache_dir,
        progress=progress,
        trial=trial,
    )
    filling = Filling(
        reads=reads,
        flash=open_flash(emulate_flash),
        overlap=overlap,
        resident=resident,
        warm_start=warm_start,
        cache_dir=cache_dir,
    )

    def assemble(loader: EngineLoader) -> Model:
        text = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
        now = dataclasses.replace(loading, process=own_memory())
        plan = plan_memory(bundle, loader.describe(now), memory, available_memory())
        return _assemble(bundle, loader, plan, text, filling)

    return with_loader(bundle, chosen, options, assemble)


class Filling(NamedTuple):
    """How rows are read, and which of them before the first prompt; arguments of load."""

    reads: ReadMode
    flash: EmulatedFlash | None
    overlap: bool
    resident: bool
    warm_start: bool
    cache_dir: str | Path | None


def _assemble(
    bundle: Bundle, loader: EngineLoader, plan: MemoryPlan, text: TextCodec, filling: Filling
) -> Model:
    """Open what the plan counts."""
    format, overlap, cache_dir = bundle.manifest.table_format, filling.overlap, filling.cache_dir
    if format is None:
        backend = loader.open(None)
        chunk = min(plan.chunk_tokens, loader.step_tokens)
        made = Engine(backend, NoRows(), chunk, overlap=overlap)
        return Model(bundle, made, plan, text)
    with ExitStack() as opened:
        flash = opened.enter_context(
            open_store(bundle.file(TABLES), format, filling.reads, filling.flash)
        )
        storage = loader.make_slots(format.tables, plan.slots)
        cache = RowCache(storage)
        store = HostTier(flash, plan.host_slots) if plan.host_slots else flash
        rows = Prefetcher(store, cache, overlap=overlap)
        opened.callback(rows.close)
        wanted = np.zeros(0, np.int64)
        if filling.warm_start and not filling.resident:
            wanted = expected_records(bundle, rows, cache_dir)

        def fill_slots() -> None:
            if filling.resident:
                rows.fill(np.arange(plan.slots), plan.chunk_tokens)
            fill(rows, wanted, plan.chunk_tokens)

        backend = _open_and_fill(loader, storage, fill_slots)
        chunk = min(plan.chunk_tokens, loader.step_tokens)
        made = Engine(backend, rows, chunk, overlap=overlap)
        keep = (lambda: keep_counts(bundle, cache, cache_dir)) if filling.warm_start else None
        model = Model(bundle, made, plan, text, keep)
        opened.pop_all()
    return model


def memory_plan(
    path: str | Path,
    memory: int | str | None = None,
    context_length: int | None = None,
    *,
    engine: EngineChoice = "auto",
    slots: int | None = None,
    resident: bool = False,
    prefill_graph: bool | None = None,
    prepare: bool = True,
    repack: bool = False,
    threads: int | None = None,
    cache_dir: str | Path | None = None,
    providers: Providers = None,
    device_memory: int | str | None = None,
    provider_libraries: Mapping[str, str | Path] | None = None,
    host_slots: int | None = None,
) -> MemoryPlan:
    """The memory plan that `load` would follow here and now; see there. Loads nothing.

    prepare: as if the backbone were prepared, which a first load does. On an accelerator, as if it
        ran the first variant of the graphs that is tried.
    """
    bundle = open_bundle(path)
    chosen = choose_engine(bundle, engine)
    TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    loading = Loading(
        context_length=_context(bundle, context_length),
        process=own_memory(),
        engine=chosen,
        slots=_slots(bundle, slots, resident=resident),
        threads=_threads(threads),
        repack=repack,
        host_slots=_host_slots(host_slots),
    )
    check_options(
        chosen,
        providers=providers,
        device_memory=device_memory,
        prefill_graph=prefill_graph,
        repack=repack,
    )
    if providers is not None or device_memory is not None:
        loading = plan_on_device(bundle, loading, providers, provider_libraries, device_memory)
    if chosen == "onnxruntime" and loading.device is None:
        from stem_edge.runtime.loading_ort import planned

        loading = planned(
            bundle, loading, prefill_graph=prefill_graph, prepare=prepare, cache_dir=cache_dir
        )
    return plan_memory(bundle, loading, memory, available_memory())


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


def _slots(bundle: Bundle, wanted: int | None, *, resident: bool) -> int | None:
    if resident and wanted is not None:
        raise InputError(
            f"slots is {wanted}, and resident keeps the rows of every token; leave one of them out"
        )
    return bundle.manifest.model.records if resident else wanted


def _host_slots(wanted: int | None) -> int | None:
    if wanted is not None and wanted < 0:
        raise InputError(f"host_slots is {wanted}; expected 0 or more")
    return wanted


def _threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; expected at least 1")
    return threads or usable_cpus()


def _context(bundle: Bundle, wanted: int | None) -> int:
    longest = bundle.manifest.model.max_context
    context = min(longest, DEFAULT_CONTEXT) if wanted is None else wanted
    if not 0 < context <= longest:
        raise InputError(f"context_length is {context}; this model takes 1 to {longest}")
    return context
