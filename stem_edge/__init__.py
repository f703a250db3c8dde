"""stem-edge: run language models that are bigger than memory, with their lookup tables on flash.

    import stem_edge

    with stem_edge.load("model") as model:
        print(model.generate_text("The capital of France is"))

`import stem_edge` is fast, because each name is imported on first use. Errors are in
`stem_edge.errors`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from stem_edge.errors import StemEdgeError

if TYPE_CHECKING:
    from stem_edge.apps.batches.batch import batch
    from stem_edge.apps.editing.making import make_edit
    from stem_edge.apps.measuring.quality.quality import evaluate
    from stem_edge.apps.measuring.runs.measure import measure
    from stem_edge.bundle.checksums import verify
    from stem_edge.bundle.edit_files.file import Edit, read_edit
    from stem_edge.bundle.opening import open_bundle
    from stem_edge.export import export_bundle
    from stem_edge.runtime import Chunk, MemoryPlan, Model, SamplingParams, load
    from stem_edge.runtime.grammars.grammar import Grammar
    from stem_edge.runtime.planning import memory_plan
    from stem_edge.runtime.rows.ngram_rows import open_rows
    from stem_edge.runtime.rows.table_arrays import open_tables

__version__ = "0.1.0"

# Since version 1.31 onnxruntime collects an id of this machine and counts of its use. Turned off
# here, so that child processes inherit it; set the variable to 0 to allow it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Chunk",
    "Edit",
    "Grammar",
    "MemoryPlan",
    "Model",
    "SamplingParams",
    "StemEdgeError",
    "batch",
    "evaluate",
    "export_bundle",
    "load",
    "make_edit",
    "measure",
    "memory_plan",
    "open_bundle",
    "open_rows",
    "open_tables",
    "read_edit",
    "verify",
]

# Module -> public names that it provides.
_HOMES = {
    "apps.batches.batch": ("batch",),
    "bundle.checksums": ("verify",),
    "bundle.opening": ("open_bundle",),
    "runtime.rows.table_arrays": ("open_tables",),
    "bundle.edit_files.file": ("Edit", "read_edit"),
    "apps.editing.making": ("make_edit",),
    "export": ("export_bundle",),
    "apps.measuring.quality.quality": ("evaluate",),
    "apps.measuring.runs.measure": ("measure",),
    "runtime": ("Chunk", "MemoryPlan", "Model", "SamplingParams", "load"),
    "runtime.grammars.grammar": ("Grammar",),
    "runtime.planning": ("memory_plan",),
    "runtime.rows.ngram_rows": ("open_rows",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"stem_edge.{module}"), name)
    raise AttributeError(f"module 'stem_edge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "errors"])
