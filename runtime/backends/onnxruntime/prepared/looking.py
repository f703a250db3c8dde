"""Whether a load looks for a prepared backbone."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.manifest import Manifest
from stem_edge.bundle.prefill_check import TRIED_NBYTES, matrices_nbytes
from stem_edge.system.user_folder import cache_folder

FOLDER = "prepared"  # in the user's cache folder
# Smaller backbones are not worth files in the cache folder, since they load fast and take little.
LEAST_NBYTES = TRIED_NBYTES


def is_large(manifest: Manifest) -> bool:
    """Return whether a backbone is prepared without being asked for."""
    return matrices_nbytes(manifest) > LEAST_NBYTES


def may_be_prepared(manifest: Manifest, cache_dir: str | Path | None) -> bool:
    """Return whether there may be a prepared backbone, or will be: looking takes a while."""
    return is_large(manifest) or (cache_folder(cache_dir) / FOLDER).is_dir()
