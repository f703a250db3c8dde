"""Loading of a bundle: plan memory, open the backbone and the tables, fill the row cache."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from stem_edge.bundle.manifest import MANIFEST, TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backends.engines import choose_engine
from stem_edge.runtime.backends.memory_plan import MemoryPlan, Room
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.load_plan import loader_of_kv, open_text, plan_load, room_of
from stem_edge.runtime.model import Model
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.rows.rows import Rows, keys_of
from stem_edge.runtime.scheduling.request import Stepping
from stem_edge.runtime.text.codec import TextCodec, TextRoom
from stem_edge.system.memory import own_memory, raise_out_of_memory

if TYPE_CHECKING:
    from stem_edge.bundle.footprint import Footprint
    from stem_edge.runtime.backends.interface import Backend, EngineLoader
    from stem_edge.runtime.backends.keywords import MoreKeywords
else:
    MoreKeywords = dict  # for those who ask for the types of load


def load(
    path: str | Path,
    memory: int | str | None = None,
    **more: Unpack[MoreKeywords],
) -> Model:
    """Load a bundle.

    path: the bundle's folder, a name that `stem-edge list` shows, or a name on a model hub (hf:org/name, or
        hf:org/name@revision), from which the files are fetched and hashed. A checkpoint (FILE.gguf, a folder, or
        hf:org/name:FILE.gguf) is converted to a bundle once, in the user's cache folder.
    memory: limit on the anonymous memory and swap of this process, in bytes or like 600MB; mapped weights do
        not count. The row cache gets what is left. Default: half of the free memory.
    threads: number of threads that compute. Default: one for each CPU that this process may use.
    context_length: most tokens of prompt and answer together. Default: the longest that fits, of the model's
        limit and the powers of two below it. Above 4096, it takes at most half of the memory without weights.
    sequences: full contexts that the KV cache has room for, for generate_many and calls in several threads.
        Default: 1.
    engine: what runs the backbone, "onnxruntime" or "ggml". Default: auto, the engine that the bundle is for.
    kv: type of keys and values: "fp32", "fp16" (ggml), "int8" or "int4". Default: auto, fp32 on onnxruntime
        and fp16 on ggml (fp32 with f32 weights), or int8 where the context would otherwise be below 4096.
    provider (onnxruntime): execution provider that runs the backbone: "cpu", "cuda", "webgpu", "coreml", or
        another by its onnxruntime name. It must run every operator. Default: cpu.
    device_memory: limit on the memory of the provider's device, in bytes or like 2GB. With the CPU as provider,
        a part of main memory stands in for the device. Default: no limit.
    speculate: when to draft tokens (speculative decoding). "auto": if it is faster and changes no answer. True, or
        the largest number of drafts in a step: if it is faster, although rounding may change answers. False:
        never. A function: it is called in every step, with all token ids so far and the largest number of
        drafts, and returns drafts. docs/python.md explains more. Default: auto.
    exact: put several tokens or sequences in a step only if each gets the same bits as in a step of its own.
    slots: number of tokens whose rows the row cache holds. Default: as many as fit.
    resident: read all tables into memory while loading.
    tables: URL of the bundle's folder tables.zarr (https://..., s3://..., a path), if its shards are there
        instead of in the bundle. fsspec opens it.
    cache_dir: folder where a first load saves weights packed for this processor or, of small models, the graphs,
        and the tokenizer in a form that loads faster. Default: the user's cache folder.
    prompt_cache: also save the KV caches of prompts in files, for later runs: a folder, or True for one in the
        user's cache folder. The files contain the prompts. Not on accelerators.
    progress: show a progress bar on stderr while downloading files or packing weights. Default: a bar if
        stderr is a terminal, else a line of text every 10 seconds of long work.

    Raises BundleError, HubError, MemoryPlanError, OutOfMemoryError, BackendError, InputError; for a checkpoint
    also CheckpointError, ExportError.
    """
    return load_with(path, LoadOptions.public({"memory": memory, **more}))


def load_with(path: str | Path, options: LoadOptions) -> Model:
    """Load a bundle as `load` does. LoadOptions has more options than `load` has keywords."""
    try:
        return _load(open_or_make(path, options), options)
    except MemoryError as error:
        advice = "load with a lower memory or a smaller context_length, or free some memory"
        raise_out_of_memory(error, "to load the model", advice)


def open_or_make(path: str | Path, options: LoadOptions | None = None) -> Bundle:
    """Open a bundle as `load` does. If path is a checkpoint, first make a bundle from it."""
    options = options or LoadOptions()
    if os.path.exists(Path(path) / MANIFEST):  # noqa: PTH110 - Path.exists raises for long names
        return options.open(path)
    from stem_edge.runtime.first_load.made import open_made

    return open_made(path, options)


def _load(bundle: Bundle, options: LoadOptions) -> Model:
    chosen = choose_engine(bundle, options.engine)
    options.contexts(bundle)  # first, because a length that cannot be should be refused at once
    text = open_text(bundle, options)
    loader, _ = loader_of_kv(bundle, chosen, options, text.nbytes_to_come)
    loader.prepare()  # after a plan, which may refuse, because this may take long
    room = room_of(bundle, options, text.nbytes_to_come)
    plan = plan_load(bundle, loader, options, room)
    text.room = TextRoom(plan.text, max(plan.total, room.limit))
    if options.prompt_cache and plan.device is not None:
        raise InputError(
            f"prompt_cache keeps prompts that the CPU's own graphs computed, not those of "
            f"{loader.name}; leave it out, or leave out provider and device_memory"
        )
    return _assemble(bundle, loader, plan, text, options, room)


def _assemble(
    bundle: Bundle,
    loader: EngineLoader,
    plan: MemoryPlan,
    text: TextCodec,
    options: LoadOptions,
    room: Room,
) -> Model:
    """Open the backbone and the tables as planned. With `options.resident`, read all rows into the row cache.

    With a memory limit, the row cache also gets the memory that is left once the backbone is open.
    """
    format, needs = bundle.manifest.table_format, loader.needs(plan.context_length)

    def model(backend: Backend, rows: Rows, plan: MemoryPlan = plan) -> Model:
        engine = Engine(backend, rows, plan.chunk_tokens, plan.logit_tokens)
        with ExitStack() as failed:
            failed.callback(engine.close)
            prefixes = _open_prefixes(bundle, engine, plan, needs.footprint, options)
            costs, speculation = loader.step_costs, None
            if options.guesses_ahead(costs):
                from stem_edge.runtime.speculation.opening import open_speculation

                speculation = open_speculation(engine, plan, needs.footprint, costs, options)
            failed.pop_all()
        stepping = Stepping(options.exact, costs, speculation)
        return Model(bundle, engine, plan, text, prefixes, stepping)

    if format is None:
        return model(loader.open(None), Rows())
    # Imported here, because dense models do not need these modules.
    from stem_edge.runtime.rows.cache import RowCache
    from stem_edge.runtime.rows.store import open_store
    from stem_edge.runtime.rows.table_rows import TableRows

    with ExitStack() as opened:
        tables = open_store(bundle.file(TABLES), format, options.emulate_flash, bundle.tables)
        opened.callback(tables.close)
        # The row cache may fill a memory limit; its size is set after the loaded backbone is measured.
        grows = room.memory is not None and room.slots is None and plan.device is None
        most = plan.slots + plan.more_slots(needs) * grows
        cache = RowCache(loader.slots(format.tables, most), plan.slots)
        keys = keys_of(bundle.manifest.model)
        rows = TableRows(tables, cache, overlap=options.overlap, keys=keys)
        opened.callback(rows.close)
        every = range(plan.slots) if options.resident else range(0)
        for start in range(0, len(every), plan.chunk_tokens):  # the plan includes one such batch
            slots, missing = cache.find(np.array(every[start : start + plan.chunk_tokens]))
            cache.install(missing, tables.read(missing), slots)
        backend = loader.open(cache.storage)
        if grows:
            plan = plan.measured(own_memory() + room.later, needs, room.limit)
            cache.slots = plan.slots
        loaded = model(backend, rows, plan)
        opened.pop_all()
    return loaded


def _open_prefixes(
    bundle: Bundle, engine: Engine, plan: MemoryPlan, footprint: Footprint, options: LoadOptions
) -> Prefixes:
    """Open the prefix cache in memory, and the folder of `prompt_cache` if that option is set."""
    # A device's memory is taken at once, not as a context fills.
    keep, folder = plan.device is None, None
    if keep and options.prompt_cache:
        from stem_edge.runtime.prefixes.opening import open_folder  # only for prompts in files

        folder = open_folder(bundle, plan, options)
    length, limit = plan.context_length, plan.kv_nbytes
    return Prefixes(engine, length, footprint.kv_nbytes, limit, folder, keeps=keep)
