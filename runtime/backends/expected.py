"""What an engine takes of memory, as expected before it runs a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.tables.codecs import RowType
from stem_edge.tables.store import TableFormat

NeedsAt: TypeAlias = Callable[[int], Needs]  # context length -> needs


class Expected(Protocol):
    """Module `expected` of an engine's folder."""

    ALIVE: float  # share of the planned activations that is alive at once
    KEEPS: bool  # whether activations of a prompt stay while decoding

    def footprints(
        self, model: ModelConfig, tables: Callable[[RowType], TableFormat | None]
    ) -> list[Footprint]:
        """Return the sizes of the bundles that an export could make, most exact first."""

    def types(self, footprint: Footprint) -> tuple[str, str]:
        """Return the types of the backbone for people, and the options that export it so."""

    def prepared_folder(
        self, bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice
    ) -> Path | None:
        """Return the folder with a form of the backbone made for this machine; None without one."""

    def needs_at(
        self, footprint: Footprint, bundle: Bundle | None, *, prefill: bool, repack: bool
    ) -> NeedsAt:
        """Return the needs of a load, with all processors of this machine."""

    def read_in_place(self, needs: Needs) -> int:
        """Return the bytes of weights that every token reads in mapped files."""

    def loaded(self, needs: Needs) -> tuple[int, int]:
        """Return the anonymous bytes that loading adds, and those that it takes meanwhile."""

    def mapped(self, needs: Needs, prompt_tokens: int, distinct_tokens: int) -> tuple[int, int]:
        """Return the bytes of mapped pages that decoding reads, and that only prompts read."""
