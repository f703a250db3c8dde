"""Bundle -> tokens. Imports numpy, onnxruntime, tokenizers and msgspec; never torch, onnx or zarr."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stem_edge.bundle import TABLES, open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backend import open_backend
from stem_edge.runtime.cache import RowCache
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.model import Chunk, Model
from stem_edge.runtime.plan import plan_memory
from stem_edge.runtime.prefetch import Prefetcher
from stem_edge.runtime.sampling import SamplingParams
from stem_edge.runtime.store import ReadMode, open_store

__all__ = ["Chunk", "Model", "SamplingParams", "load"]

# The KV cache is memory: a model built for 128k tokens must not take gigabytes unasked.
DEFAULT_CONTEXT = 4096


def load(
    path: str | Path,
    memory: int | str | None = None,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
    context_length: int | None = None,
    reads: ReadMode = "pread",
    *,
    overlap: bool = True,
) -> Model:
    """Load a bundle.

    memory: limit for the model's anonymous memory, in bytes or like "600MB"; the row cache gets
        what the rest leaves. Default: a row cache of up to 256 MiB.
    threads: of the backbone. Default: the CPUs this process may use.
    providers: onnxruntime execution providers, tried in this order. Default: the CPU.
    context_length: tokens of prompt and answer together. Default: the model's own, up to 4096.
    reads: "pread" turns a failing disk into an error; "mmap" may kill the process instead.
    overlap: read rows ahead in a thread; without it the same tokens come out, more slowly.

    Raises BundleError, MemoryPlanError, BackendError, InputError.
    """
    bundle = open_bundle(path)
    config = bundle.manifest.model
    context = min(config.max_context, DEFAULT_CONTEXT) if context_length is None else context_length
    if not 0 < context <= config.max_context:
        raise InputError(f"context_length is {context}; this model takes 1 to {config.max_context}")
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; expected at least 1")
    plan = plan_memory(bundle, context, memory)
    store = open_store(bundle.file(TABLES), bundle.manifest.tables, reads)
    try:
        cache = RowCache(bundle.manifest.tables, plan.slots)
        backend = open_backend(bundle, cache, threads or _usable_cpus(), providers)
        rows = Prefetcher(store, cache, overlap=overlap)
        engine = Engine(backend, rows, plan.chunk_tokens, overlap=overlap)
        return Model(bundle, engine, plan)
    except BaseException:
        store.close()
        raise


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
