"""Folders in Hugging Face's form, changed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import torch
from safetensors.torch import load_file, save_file

from stem_edge.export.checkpoints.hugging_face import read_checkpoint


def edit(folder: Path, file: str = "config.json", **values: Any) -> None:
    """Change values of a JSON file."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, *parts: str) -> None:
    """Reading fails in one line that names the folder and these parts."""
    exports.refused(lambda: read_checkpoint(folder), folder, *parts)
