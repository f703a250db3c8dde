"""The check of a bundle's backbone in GGUF."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.manifest import MANIFEST, Manifest
from stem_edge.files.plain_files import damaged
from stem_edge.ggml import gguf_schema
from stem_edge.ggml.gguf_tensors import locate
from stem_edge.graph.formats import GGUF, GgufFormat


def check_gguf(root: Path, manifest: Manifest, gguf: GgufFormat) -> None:
    """Raise BundleError for a backbone that ggml cannot run, or whose file is not as described."""
    if foreign := gguf_schema.foreign_parts(manifest.model):
        raise damaged(
            root / MANIFEST,
            f"a backbone in {GGUF} with {', '.join(foreign)}, which only onnxruntime can run",
        )
    locate(root / GGUF, manifest.files[GGUF].nbytes, manifest.model, gguf.weights)
