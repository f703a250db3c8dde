"""What a bundle is compared with: another bundle, or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stem_edge.bundle.hub.names import hub_name
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.bundle.on_hub import NoBundleError
from stem_edge.bundle.opening import bundle_folder
from stem_edge.errors import InputError

if TYPE_CHECKING:
    from stem_edge.export.checkpoints.checkpoint import Checkpoint


def model_folder(path: str | Path) -> Path:
    """Return the folder of a bundle or checkpoint; one on a hub (hf:org/name) is fetched.

    Raises HubError, BundleError, CheckpointError, InputError.
    """
    if hub_name(path) is None:
        return Path(path)
    try:
        return bundle_folder(path)
    except NoBundleError as error:
        from stem_edge.export.checkpoints.fetched import checkpoint_folder

        return checkpoint_folder(str(error.found))


def is_bundle(path: Path) -> bool:
    """Return whether a path is a bundle, not a checkpoint. Raises InputError if nothing is there."""
    if not path.exists():
        raise InputError(f"{path}: no such folder; give a bundle, or the folder of a checkpoint")
    return (path / MANIFEST).is_file()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint as stem-edge export does. Raises CheckpointError."""
    from stem_edge.export.checkpoints.readers import read_checkpoint

    return read_checkpoint(path)
