"""What is known of onnxruntime before it runs a bundle: types to choose from, memory, and prepared files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as changed

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import Footprint, footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.kv import KvChoice
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.prepared import LEAST_NBYTES
from stem_edge.runtime.backends.onnxruntime.prepared.deciding import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import find_prepared
from stem_edge.system.memory import usable_cpus
from stem_edge.tables.codecs import RowType
from stem_edge.tables.store import TableFormat

# Types that an export may choose, most exact first. They only come near its qualities, because
# an export measures which matrices get 8 bits.
_FOUR = BackboneFormat(
    weights="int4", head="int8", block_size=64, asymmetric=True, prefill=True, kv_peaks=True
)
CHOICES: tuple[tuple[BackboneFormat, RowType], ...] = (
    (changed(_FOUR, weights="int8", block_size=32, asymmetric=False), "int8"),
    (changed(_FOUR, kinds={"qkv": "int8"}), "int8"),
    (_FOUR, "int8"),
    (_FOUR, "int4"),
)


def footprints(
    model: ModelConfig, tables: Callable[[RowType], TableFormat | None]
) -> list[Footprint]:
    """Return the sizes of the bundles that an export could make, most exact first."""
    return [
        expected_footprint(changed(format, tied=model.tied_head), model, tables(rows))
        for format, rows in CHOICES
    ]


def types(footprint: Footprint) -> tuple[str, str]:
    """Return the types of the backbone for people, and the options that export it so."""
    backbone = footprint.backbone
    block = getattr(backbone, "block_size", 0) if backbone.weights != "fp32" else 0
    shown = f"backbone {backbone.weights}" + f" in blocks of {block}" * bool(block)
    return shown, f"--type {backbone.weights}"


def prepared_folder(bundle: Bundle, cache_dir: str | Path | None, kv: KvChoice) -> Path | None:
    """Return the folder of the prepared backbone's mapped files; None without one."""
    kept = footprint_of(bundle.manifest, "onnxruntime").with_kv(kv).kv
    found = find_prepared(bundle, cache_dir, kept)
    return None if found is None else found.folder


def needs(footprint: Footprint, context: int, *, prefill: bool) -> Needs:
    """Return the needs of a load with all processors of this machine."""
    cpus, nbytes = usable_cpus(), footprint.backbone_nbytes + footprint.prefill_nbytes
    prepared = nbytes > LEAST_NBYTES
    found = cpu_needs(footprint, context, cpus, prepared=prepared, prefill=prefill, drafts=prepared)
    return replace(found, preparing=preparing_needs(footprint, cpus) if prepared else None)
