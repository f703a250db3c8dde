"""Plans for ggml without loading it: memory needs."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.ggml.loader import ggml_needs
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.system.memory import usable_cpus


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return None: the backbone is mapped as it was exported."""
    return None


def needs(footprint: Footprint, context: int, *, prefill: bool) -> Needs:
    """Return the needs of a load with all processors of this machine."""
    return ggml_needs(footprint, context, usable_cpus())
