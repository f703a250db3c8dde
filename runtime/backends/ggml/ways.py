"""Ways of running a bundle that are ggml's own, compared by runtime/consistency.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError
from stem_edge.ggml.check import checked_ggml
from stem_edge.runtime.backends.ggml.weights import can_repack

# It uses other attention kernels from TILE tokens on, and other products for a few tokens.
TILE, FEW_SLOTS = 64, (16, 48)


def missing(cache_dir: str | Path | None) -> str:
    """Return why the library cannot run here; empty if it can."""
    try:
        checked_ggml(cache_dir)
    except BackendError as error:
        return str(error)
    return ""


def kernels(bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return kernels that round in the same way: name -> options of `load` that choose them."""
    found: dict[str, dict[str, Any]] = {"ggml": {}}
    repacked_nbytes = footprint_of(bundle.manifest, "ggml").repacked_nbytes
    if can_repack(checked_ggml(cache_dir)) and repacked_nbytes:
        found["ggml repacked"] = {"repack": True}
    return found


def ways(bundle: Bundle, cache_dir: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return further ways with these kernels."""
    return {}
