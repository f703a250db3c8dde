"""What is known of onnxruntime before it runs a bundle: memory and prepared files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stem_edge.bundle.footprint import Footprint, footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.prepared import LEAST_NBYTES
from stem_edge.runtime.backends.onnxruntime.prepared.deciding import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import find_prepared
from stem_edge.system.memory import usable_cpus


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return the folder of the prepared backbone's mapped files; None without one."""
    kept = footprint_of(bundle.manifest, "onnxruntime").with_kv(kv).kv
    found = find_prepared(bundle, cache_dir, kept)
    return None if found is None else found.folder


def needs(footprint: Footprint, context: int, *, prefill: bool) -> Needs:
    """Return the needs of a load with all processors of this machine."""
    cpus, nbytes = usable_cpus(), footprint.backbone_nbytes + footprint.prefill_nbytes
    prepared = nbytes > LEAST_NBYTES
    found = cpu_needs(footprint, context, cpus, prepared=prepared, prefill=prefill, drafts=prepared)
    return replace(found, preparing=preparing_needs(footprint, cpus) if prepared else None)
