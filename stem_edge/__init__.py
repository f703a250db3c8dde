"""stem-edge: run STEM language models whose parameters do not fit in memory.

    import stem_edge

    with stem_edge.load("model") as model:
        print(model.generate_text("The capital of France is"))

Everything here is loaded when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stem_edge.errors import (
    BackendError,
    BundleError,
    CheckpointError,
    ExportError,
    InputError,
    MemoryPlanError,
    RowReadError,
    StemEdgeError,
)

if TYPE_CHECKING:
    from stem_edge.bundle import open_bundle, verify
    from stem_edge.export import export_bundle
    from stem_edge.mmap_store import MmapStore
    from stem_edge.runtime import Chunk, MemoryPlan, Model, SamplingParams, load, memory_plan
    from stem_edge.runtime.runs import verify_runs
    from stem_edge.tables import open_tables

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "ExportError",
    "InputError",
    "MemoryPlan",
    "MemoryPlanError",
    "MmapStore",
    "Model",
    "RowReadError",
    "SamplingParams",
    "StemEdgeError",
    "export_bundle",
    "load",
    "memory_plan",
    "open_bundle",
    "open_tables",
    "verify",
    "verify_runs",
]

_HOMES = {
    "Chunk": "stem_edge.runtime",
    "MemoryPlan": "stem_edge.runtime",
    "MmapStore": "stem_edge.mmap_store",
    "Model": "stem_edge.runtime",
    "SamplingParams": "stem_edge.runtime",
    "export_bundle": "stem_edge.export",
    "load": "stem_edge.runtime",
    "memory_plan": "stem_edge.runtime",
    "open_bundle": "stem_edge.bundle",
    "open_tables": "stem_edge.tables",
    "verify": "stem_edge.bundle",
    "verify_runs": "stem_edge.runtime.runs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stem_edge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
