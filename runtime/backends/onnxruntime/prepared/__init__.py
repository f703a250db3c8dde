"""Prepared backbones: matrices are packed once for this processor, into files that loads then map.

Each load asks this module whether a backbone may be prepared, so it imports little.
"""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.footprint import LEAST_PREPARED
from stem_edge.bundle.manifest import Manifest
from stem_edge.files.names import cache_folder
from stem_edge.graph.formats import BACKBONE_DATA, PREFILL_DATA

FOLDER = "prepared"  # in the user's cache folder


def is_large(manifest: Manifest) -> bool:
    """Return True if this backbone is so large that the first load prepares it."""
    names = [name for name in (BACKBONE_DATA, PREFILL_DATA) if name in manifest.files]
    return sum(manifest.files[name].nbytes for name in names) > LEAST_PREPARED


def may_be_prepared(manifest: Manifest, cache_dir: str | Path | None) -> bool:
    """Return False if there cannot be a prepared form of this backbone, so a load need not look for it."""
    return is_large(manifest) or (cache_folder(cache_dir) / FOLDER).is_dir()
