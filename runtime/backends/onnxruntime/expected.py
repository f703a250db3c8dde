"""What is known of onnxruntime before it runs a bundle."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import place


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return the folder of the prepared backbone, from which files are mapped; None without one."""
    kept = footprint_of(bundle.manifest, "onnxruntime").with_kv(kv).kv
    found = place(bundle, cache_dir, kept).prepared
    return None if found is None else found.folder
