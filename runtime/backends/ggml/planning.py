"""Plans for ggml without loading it: types of exports to choose from, and memory needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stem_edge.bundle.footprint import Footprint, gguf_footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import GgufFormat, GgufType
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.ggml.loader import ggml_needs
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.system.memory import usable_cpus
from stem_edge.tables.codecs import RowType
from stem_edge.tables.store import TableFormat

CHOICES: tuple[tuple[GgufType, RowType], ...] = (
    ("q8_0", "int8"),
    ("q5_k_m", "int8"),
    ("q4_k_m", "int8"),
    ("q4_k_m", "int4"),
)


def footprints(
    model: ModelConfig, tables: Callable[[RowType], TableFormat | None]
) -> list[Footprint]:
    """Return the sizes of the bundles that an export could make, most exact first."""
    return [
        gguf_footprint(model, GgufFormat(weights=weights), tables(rows))
        for weights, rows in CHOICES
    ]


def types(footprint: Footprint) -> tuple[str, str]:
    """Return the types of the backbone for people, and the options that export it so."""
    backbone = footprint.backbone
    name = getattr(backbone, "name", "")
    return f"backbone {name} for ggml", f"--engine ggml --type {backbone.weights}"


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return None: the backbone is mapped as it was exported."""
    return None


def needs(footprint: Footprint, context: int, *, prefill: bool) -> Needs:
    """Return the needs of a load with all processors of this machine."""
    return ggml_needs(footprint, context, usable_cpus())
