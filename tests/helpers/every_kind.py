"""Checkpoints of random weights: STEM models of the table of architectures, Gemma 4, Gemma 3n."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from architectures import SIZES, VARIANTS, write
from hf_folders import write_gemma
from installed import DATA

from stem_edge.config import ModelConfig

GEMMA_4, GEMMA_3N = "Gemma 4", "Gemma 3n"


def checkpoint_of(name: str, folder: Path, **changes: Any) -> Path:
    """Return a checkpoint of this kind. changes: of the fields of a STEM model."""
    if name == GEMMA_3N:
        return DATA / "conformance" / "gemma3n-text"
    if name == GEMMA_4:
        write_gemma(folder, 8)
    else:
        write(folder, ModelConfig(**(SIZES | VARIANTS[name] | changes)), tokens=8)
    return folder
