"""Which trainer wrote a checkpoint, and the reader for it.

| reader | recognised by |
|---|---|
| hugging_face.py | config.json: dense models, and this project's own schema for STEM models |
| lingua.py | params.json |
| blagpt.py | a file state_step*.pt or best_model*.pt, or a folder that holds some |
"""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle import MANIFEST
from stem_edge.errors import CheckpointError
from stem_edge.export.blagpt import find_states
from stem_edge.export.blagpt import read_checkpoint as read_blagpt
from stem_edge.export.checkpoint import Checkpoint
from stem_edge.export.hugging_face import CONFIG
from stem_edge.export.hugging_face import read_checkpoint as read_hugging_face
from stem_edge.export.lingua import PARAMS
from stem_edge.export.lingua import read_checkpoint as read_lingua


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint of any known trainer. Raises CheckpointError."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such checkpoint; give a folder or file that training left"
        )
    if (path / CONFIG).is_file():  # first: Mistral's own folders hold a params.json, too
        return read_hugging_face(path)
    if (path / PARAMS).is_file():
        return read_lingua(path)
    if find_states(path):
        return read_blagpt(path)
    _refuse(path)
    return read_lingua(path)  # which says what is missing, and where it may be


def _refuse(path: Path) -> None:
    """What is often given in place of a checkpoint."""
    if path.is_file():
        raise CheckpointError(
            f"{path}: not a checkpoint; give the folder it lies in, or a .pt file of BlaGPT"
        )
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: is a bundle; give the checkpoint that it was made of")
    if any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: holds safetensors, but no {CONFIG}; copy that file, too")
