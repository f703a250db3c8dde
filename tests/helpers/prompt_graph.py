"""Bundles whose decoding graph computes prompts, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stem_edge.bundle.manifest import MANIFEST
from stem_edge.graph.formats import PREFILL_DATA


def without_prompt_graph(bundle: Path, out: Path) -> Path:
    """Copy a bundle, and leave out its graph for prompts."""
    shutil.copytree(bundle, out)
    manifest = json.loads((out / MANIFEST).read_bytes())
    if manifest["files"].pop(PREFILL_DATA, None):
        manifest["backbone"]["prefill"] = False
        (out / PREFILL_DATA).unlink()
        (out / MANIFEST).write_text(json.dumps(manifest))
    return out
