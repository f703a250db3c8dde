"""Paths of test data and the shipped model, and whether ggml is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import stem_edge
from stem_edge.ggml.installed import library_path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
ENGLISH = DATA / "english.txt"  # pages of the manual as they once were
DEMO = Path(stem_edge.__file__).parent / "demo_model"
FDS = Path("/proc/self/fd")
# ggml takes minutes to compile, so `make test` skips its tests.
HAS_GGML = library_path() is not None and find_spec("gguf") is not None
NO_GGML = "ggml is not installed (make test-all installs it)"
needs_ggml = pytest.mark.skipif(not HAS_GGML, reason=NO_GGML)


def export_ggml(checkpoint: Path, out: Path, **options: Any) -> None:
    """Export the checkpoint of the bundle `out` once more, in float32 for ggml, if that is installed."""
    if HAS_GGML:
        beside = bundle_for(out, "ggml")
        stem_edge.export_bundle(checkpoint, beside, engine="ggml", type="f32", **options)


def bundle_for(out: Path, engine: str) -> Path:
    """Return the bundle for an engine: `out` itself, or what export_ggml wrote beside it."""
    return out if engine == "onnxruntime" else out.with_name(f"{out.name}-ggml")
