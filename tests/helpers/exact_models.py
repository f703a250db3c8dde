"""Bundles that compute what their model does: float32 everywhere, one for each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from conformance import CASES, CONFORMANCE, reference
from installed import export_ggml

import stem_edge
from stem_edge.numerics.quantize import F32

GEMMA = "gemma4-text"  # layers with windows, and some that borrow keys and values
GEMMA_3N = "gemma3n-text"  # which ggml cannot run
GEMMAS = (GEMMA, "gemma4-wide", GEMMA_3N)
# Most that a logit may differ. Rounding to float32 alone moves those of Gemma by 1.6e-4, because
# nothing divides its scores.
TOLERANCE, TOLERANCE_OF_GEMMA = 1e-4, 5e-4


class Exact(NamedTuple):
    """A bundle, and ids with the logits [T, V] that its model has for them."""

    path: Path
    texts: list[tuple[list[int], F32]]
    tolerance: float = TOLERANCE

    @property
    def ids(self) -> list[int]:
        """Ids of the first text."""
        return self.texts[0][0]

    @property
    def expected(self) -> F32:
        """Logits of the first text."""
        return self.texts[0][1]


def export_exact(checkpoint: Path, out: Path, *, ggml: bool = True, **options: Any) -> Path:
    """Export bundles that round nothing; that for ggml is beside `out` (installed.bundle_for)."""
    stem_edge.export_bundle(checkpoint, out, type="fp32", rows="fp32", **options)
    if ggml:
        export_ggml(checkpoint, out, rows="fp32")
    return out


def published(folder: Path, name: str, **options: Any) -> Exact:
    """Export a checkpoint of tests/data/conformance, which has its trainer's logits."""
    options = {"ggml": name != GEMMA_3N} | options
    path = export_exact(CONFORMANCE / name, folder / "bundle", **options)
    if name in CASES:
        return Exact(path, list(zip(*reference(name), strict=True)))
    with np.load(CONFORMANCE / name / "reference.npz") as data:
        return Exact(path, [(data["ids"].tolist(), data["logits"])], TOLERANCE_OF_GEMMA)


def off(found: F32, expected: F32) -> float:
    """Return the largest difference."""
    return float(np.abs(found - expected).max(initial=0))
