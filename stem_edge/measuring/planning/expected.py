"""What an engine knows of a bundle before it runs it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol

from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime import backends


class Expected(Protocol):
    """Module `expected` of an engine's folder."""

    def prepared_folder(
        self, bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice
    ) -> Path | None:
        """Return the folder with a form of the backbone made for this machine; None without one."""


def expected(engine: str) -> Expected:
    """Return what an engine knows."""
    found: Expected = import_module(f"{backends.__name__}.{engine}.expected")
    return found
