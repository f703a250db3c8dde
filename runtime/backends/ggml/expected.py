"""What ggml takes of memory, as expected before it runs a bundle; measured with four shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stem_edge.bundle.footprint import Footprint, gguf_footprint
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.ggml.gguf_schema import repacked_nbytes
from stem_edge.graph.formats import GgufFormat, GgufType
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.ggml.loader import ggml_needs
from stem_edge.runtime.backends.ggml.weights import repacked_for_prompts
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.system.memory import usable_cpus
from stem_edge.tables.codecs import RowType
from stem_edge.tables.store import TableFormat

ALIVE, KEEPS = 1.0, True  # share of the planned activations that is alive at once; these stay
LIBRARY_NBYTES, LAYER_NBYTES = 1_200_000, 260_000  # of threads and kernels; of a layer's graph
MAPPED_AROUND_ROW = 40_000  # of the embedding: the system maps more than is needed
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


def needs_at(
    footprint: Footprint, bundle: Bundle | None, *, prefill: bool, repack: bool
) -> Callable[[int], Needs]:
    """Return context -> needs of a load, with all processors of this machine."""
    return lambda context: ggml_needs(footprint, context, usable_cpus(), repack=repack)


def read_in_place(needs: Needs) -> int:
    """Return the bytes of weights that every token reads in the mapped file."""
    return needs.footprint.step_nbytes - _repacked(needs)


def loaded(needs: Needs) -> tuple[int, int]:
    """Return the anonymous bytes that loading adds, and those that it takes meanwhile."""
    return LIBRARY_NBYTES + needs.footprint.model.n_layers * LAYER_NBYTES + _repacked(needs), 0


def mapped(needs: Needs, prompt_tokens: int, distinct_tokens: int) -> tuple[int, int]:
    """Return the bytes of mapped pages that decoding reads, and of those that only prompts read."""
    footprint = needs.footprint
    touched = min(distinct_tokens * MAPPED_AROUND_ROW, footprint.embedding_nbytes)
    whole = min(footprint.step_nbytes + touched, footprint.backbone_nbytes)
    if not needs.repack or not isinstance(footprint.backbone, GgufFormat):
        return whole, 0
    copied = repacked_nbytes(footprint.model, footprint.backbone.weights)
    return whole - sum(n for kind, n in copied.items() if repacked_for_prompts(kind)), 0


def _repacked(needs: Needs) -> int:
    return needs.footprint.repacked_nbytes if needs.repack else 0
