"""Loading with options that are no keywords of stem_edge.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stem_edge.runtime import Model
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with


def load_fixed(path: str | Path, memory: int | str | None = None, **options: Any) -> Model:
    """Load a bundle as stem_edge.load does, such as on emulated flash."""
    return load_with(path, LoadOptions(memory=memory, **options))
