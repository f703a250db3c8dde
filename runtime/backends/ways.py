"""The ways of running bundles that are an engine's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvType
from stem_edge.runtime.backends.expected import Expected

CacheDir: TypeAlias = str | Path | None
Ways: TypeAlias = dict[str, dict[str, Any]]  # name of a way to run a bundle -> options of `load`


class EngineWays(ABC):
    """What checking, planning and measuring know of an engine."""

    tile = 0  # chunks of at least these many tokens run on kernels that round otherwise
    few_slots: tuple[int, int]  # the fewest slots to try, and some more
    # Divergence in nats that types of keys and values cause in a real model (docs/models.md).
    kv_nats: ClassVar[Mapping[KvType, float]]

    @property
    @abstractmethod
    def expected(self) -> Expected:
        """Memory that the engine is expected to take, before it runs a bundle."""

    def missing(self, cache_dir: CacheDir) -> str:
        """Return why the library cannot run here; empty if it can."""
        return ""

    @abstractmethod
    def kernels(self, bundle: Bundle, cache_dir: CacheDir) -> Ways:
        """Return the engine's kernels. Each rounds in the same way however a bundle is run."""

    def ways(self, bundle: Bundle, cache_dir: CacheDir) -> Ways:
        """Return ways with these kernels beside those that all engines have."""
        return {}
