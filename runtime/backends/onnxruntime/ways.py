"""Ways of running a bundle that are onnxruntime's own, compared by runtime/consistency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stem_edge.bundle.opening import Bundle
from stem_edge.runtime.backends.interface import LEAST_CHUNK
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import place

TILE, FEW_SLOTS = 0, (LEAST_CHUNK, 64)


def missing(cache_dir: str | Path | None) -> str:
    """Return why the library cannot run here; empty if it can."""
    return ""


def kernels(bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return kernels that round in the same way: name -> options of `load` that choose them."""
    found: dict[str, dict[str, Any]] = {"": {"prefill_graph": False}}
    if bundle.manifest.has_prefill:
        found["prefill graph"] = {"prefill_graph": True}
    return found


def ways(bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return further ways with these kernels."""
    return {"prepared": {"prepare": True}} if place(bundle, cache_dir).is_worth_it else {}
