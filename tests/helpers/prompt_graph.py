"""Loading a bundle with a choice of the graph that processes prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loading import load_fixed

from stem_edge.runtime import Model


def load_with(path: str | Path, *, prefill: bool, **options: Any) -> Model:
    """Load a bundle; without `prefill`, the graphs that decode process prompts, too."""
    model = load_fixed(path, **options)
    model.engine.uses_prefill = prefill
    return model
