"""What checking, planning and measuring know of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from stem_edge.runtime.backends.expected import Expected


class EngineWays(ABC):
    """What checking, planning and measuring know of an engine."""

    tile = 0  # chunks of at least these many tokens run on kernels that round otherwise

    @property
    @abstractmethod
    def expected(self) -> Expected:
        """Memory that the engine is expected to take, before it runs a bundle."""

    def missing(self, cache_dir: str | Path | None) -> str:
        """Return why the library cannot run here; empty if it can."""
        return ""
