"""Paths of test data and the shipped model, and whether ggml is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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


def add_ggml(checkpoint: Path, out: Path) -> None:
    """Put a backbone for ggml into the checkpoint's bundle, where ggml is installed."""
    if HAS_GGML:
        stem_edge.export_bundle(checkpoint, out, engine="gguf", backbone="f32", add=True)
