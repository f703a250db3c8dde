"""stem-edge: run STEM language models whose parameters do not fit in memory.

    import stem_edge

    with stem_edge.load("model") as model:
        print(model.generate_text("The capital of France is"))

Names of this package are imported on first use, so that importing it costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from stem_edge.errors import (
    BackendError,
    BundleError,
    CheckpointError,
    DeviceLostError,
    EditError,
    ExportError,
    HubError,
    InputError,
    MemoryPlanError,
    MissingOperatorsError,
    OutOfMemoryError,
    RowReadError,
    StemEdgeError,
    UnknownOptionError,
)

if TYPE_CHECKING:
    from stem_edge.batches.batch import Batch, batch
    from stem_edge.bundle.checksums import verify
    from stem_edge.bundle.mmap_store import MmapStore
    from stem_edge.bundle.opening import open_bundle
    from stem_edge.bundle.push import push
    from stem_edge.bundle.table_arrays import open_tables
    from stem_edge.cluster.batches import ray_answers
    from stem_edge.cluster.evaluation import ray_scores
    from stem_edge.cluster.exports import ray_shards
    from stem_edge.edit_files.file import Edit, read_edit
    from stem_edge.editing.compare import Comparison, compare_edits
    from stem_edge.editing.making import make_edit, make_row_edit
    from stem_edge.export import export_bundle, export_dense_gguf
    from stem_edge.measuring.analysis.geometry import geometry
    from stem_edge.measuring.bench.bench import bench
    from stem_edge.measuring.bench.measurement import Measurement, measure
    from stem_edge.measuring.planning.fit import fit
    from stem_edge.measuring.planning.target import Fit
    from stem_edge.measuring.quality.quality import Quality, evaluate
    from stem_edge.runtime import Chunk, MemoryPlan, Model, SamplingParams, load, memory_plan
    from stem_edge.runtime.backends.onnxruntime.providers.resolve import providers
    from stem_edge.runtime.consistency import verify_runs
    from stem_edge.runtime.first_load.safety import Safety, check_safety
    from stem_edge.runtime.grammars.grammar import Grammar

__version__ = "0.1.0"

# Since version 1.31 onnxruntime collects an id of this machine and counts of its use. Turned off
# here, so that child processes inherit it; set the variable to 0 to allow it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "BackendError",
    "Batch",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "Comparison",
    "DeviceLostError",
    "Edit",
    "EditError",
    "ExportError",
    "Fit",
    "Grammar",
    "HubError",
    "InputError",
    "Measurement",
    "MemoryPlan",
    "MemoryPlanError",
    "MissingOperatorsError",
    "MmapStore",
    "Model",
    "OutOfMemoryError",
    "Quality",
    "RowReadError",
    "Safety",
    "SamplingParams",
    "StemEdgeError",
    "UnknownOptionError",
    "batch",
    "bench",
    "check_safety",
    "compare_edits",
    "evaluate",
    "export_bundle",
    "export_dense_gguf",
    "fit",
    "geometry",
    "load",
    "make_edit",
    "make_row_edit",
    "measure",
    "memory_plan",
    "open_bundle",
    "open_tables",
    "providers",
    "ray_answers",
    "ray_scores",
    "ray_shards",
    "push",
    "read_edit",
    "verify",
    "verify_runs",
]

# Module -> public names that it provides.
_HOMES = {
    "stem_edge.batches.batch": ("Batch", "batch"),
    "stem_edge.bundle.opening": ("open_bundle",),
    "stem_edge.bundle.checksums": ("verify",),
    "stem_edge.cluster.batches": ("ray_answers",),
    "stem_edge.cluster.evaluation": ("ray_scores",),
    "stem_edge.cluster.exports": ("ray_shards",),
    "stem_edge.bundle.push": ("push",),
    "stem_edge.edit_files.file": ("Edit", "read_edit"),
    "stem_edge.editing.compare": ("Comparison", "compare_edits"),
    "stem_edge.editing.making": ("make_edit", "make_row_edit"),
    "stem_edge.export": ("export_bundle",),
    "stem_edge.export.dense_gguf": ("export_dense_gguf",),
    "stem_edge.measuring.bench.bench": ("bench",),
    "stem_edge.measuring.planning.fit": ("fit",),
    "stem_edge.measuring.planning.target": ("Fit",),
    "stem_edge.measuring.analysis.geometry": ("geometry",),
    "stem_edge.measuring.bench.measurement": ("Measurement", "measure"),
    "stem_edge.measuring.quality.quality": ("Quality", "evaluate"),
    "stem_edge.bundle.mmap_store": ("MmapStore",),
    "stem_edge.runtime": ("Chunk", "MemoryPlan", "Model", "SamplingParams", "load", "memory_plan"),
    "stem_edge.runtime.backends.onnxruntime.providers.resolve": ("providers",),
    "stem_edge.runtime.consistency": ("verify_runs",),
    "stem_edge.runtime.first_load.safety": ("Safety", "check_safety"),
    "stem_edge.runtime.grammars.grammar": ("Grammar",),
    "stem_edge.bundle.table_arrays": ("open_tables",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'stem_edge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
