"""Loading a bundle with a choice of the graph that processes prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stem_edge
from stem_edge.runtime import Model


def load_with(path: str | Path, *, prefill: bool, **options: Any) -> Model:
    """Load a bundle; without `prefill`, the graphs that decode process prompts, too."""
    model = stem_edge.load(path, **options)
    model.engine.uses_prefill = prefill
    return model
