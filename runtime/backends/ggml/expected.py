"""What is known of ggml before it runs a bundle."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return None: the backbone is mapped as it was exported."""
    return None
