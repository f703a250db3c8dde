"""A path that a user gave: a bundle, or a checkpoint to make one of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.bundle import MANIFEST
from stem_edge.errors import InputError, StemEdgeError

if TYPE_CHECKING:
    from stem_edge.export.checkpoint import Checkpoint


def is_bundle(path: Path) -> bool:
    """Whether a folder is a bundle, not a checkpoint. Raises InputError if there is no folder."""
    if not path.exists():
        raise InputError(f"{path}: no such folder; give a bundle, or the folder of a checkpoint")
    return (path / MANIFEST).is_file()


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint that stem-edge export takes. Raises CheckpointError, or says what to install."""
    try:
        from stem_edge.export.readers import read_checkpoint
    except ImportError as error:
        if error.name is None or error.name.startswith("stem_edge"):
            raise
        raise StemEdgeError(
            f"{path}: not a bundle, and reading a checkpoint needs the package {error.name}; "
            "install it with: pip install 'stem-edge[export]'"
        ) from error
    return read_checkpoint(path)
