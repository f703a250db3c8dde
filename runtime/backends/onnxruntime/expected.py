"""What onnxruntime takes of memory, as expected before it runs a bundle; measured with four shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as changed

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import FLOAT, Footprint, footprint_of
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import WEIGHT_BITS, BackboneFormat
from stem_edge.graph.kv import KvChoice
from stem_edge.graph.linear import SPLIT_VALUES
from stem_edge.runtime.backends.interface import PREFILL_FROM
from stem_edge.runtime.backends.memory_plan import Needs
from stem_edge.runtime.backends.onnxruntime.needs import cpu_needs
from stem_edge.runtime.backends.onnxruntime.prepared import LEAST_NBYTES, is_large
from stem_edge.runtime.backends.onnxruntime.prepared.packable import preparing_needs
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import find_prepared
from stem_edge.system.memory import usable_cpus
from stem_edge.tables.codecs import RowType
from stem_edge.tables.store import TableFormat

# A plan adds up the widest arrays of a graph. This share of them is alive at once; none stays.
ALIVE, KEEPS = 0.42, False
SESSIONS_NBYTES, LAYER_NBYTES = 6_000_000, 125_000  # of sessions and threads; of a layer in a graph
PACKED_OVER_DATA = 1.06  # in its memory, because it pads matrices
# It reads this share of the embedding, its scales, as a whole. Around each row, and around the small
# tensors of all graphs, the system maps more than is needed.
EMBEDDING_SHARE, MAPPED_AROUND_ROW, MAPPED_AROUND_GRAPHS = 0.26, 40_000, 6 << 16
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
        expected_footprint(model, changed(format, tied=model.tied_head), tables(rows))
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
    return None if found is None or found.record.refused else found.folder


def needs_at(
    footprint: Footprint, bundle: Bundle | None, *, prefill: bool, repack: bool
) -> Callable[[int], Needs]:
    """Return context -> needs of a load, with all processors of this machine."""
    nbytes = footprint.backbone_nbytes + footprint.prefill_nbytes
    prepared = nbytes >= LEAST_NBYTES if bundle is None else is_large(bundle.manifest)

    def needs(context: int) -> Needs:
        found = cpu_needs(footprint, context, usable_cpus(), prepared=prepared, prefill=prefill)
        preparing = preparing_needs(footprint, usable_cpus()) if prepared else None
        return replace(found, preparing=preparing)

    return needs


def read_in_place(needs: Needs) -> int:
    """Return the bytes of weights that every token reads in mapped files."""
    return needs.footprint.step_nbytes if needs.prepared else 0


def loaded(needs: Needs) -> tuple[int, int]:
    """Return the anonymous bytes that loading adds, and those that it takes meanwhile.

    The largest matrix is packed again while a prepared backbone is loaded.
    """
    footprint, graphs = needs.footprint, 2 if needs.prefill else 1
    nbytes = SESSIONS_NBYTES + graphs * footprint.model.n_layers * LAYER_NBYTES
    if needs.prepared:
        return nbytes, int(PACKED_OVER_DATA * min(footprint.step_nbytes, 2 * SPLIT_VALUES))
    data = footprint.step_nbytes + (footprint.prefill_nbytes if needs.prefill else 0)
    return nbytes + int(PACKED_OVER_DATA * data), 0


def mapped(needs: Needs, prompt_tokens: int, distinct_tokens: int) -> tuple[int, int]:
    """Return the bytes of mapped pages that decoding reads, and of those that only prompts read."""
    footprint = needs.footprint
    touched = distinct_tokens * MAPPED_AROUND_ROW
    touched += int(EMBEDDING_SHARE * footprint.embedding_nbytes)
    touched = min(touched, footprint.embedding_nbytes)
    if not needs.prepared:
        return touched + MAPPED_AROUND_GRAPHS, 0
    uses_prefill = needs.prefill and prompt_tokens >= PREFILL_FROM
    return touched + _packed(footprint), footprint.prefill_nbytes if uses_prefill else 0


def _packed(footprint: Footprint) -> int:
    """Return the mapped bytes of packed matrices: with sums as large as scales, which may stay beside."""
    backbone = footprint.backbone
    if not isinstance(backbone, BackboneFormat) or backbone.weights == "fp32":
        return footprint.step_nbytes
    block = backbone.block_size * WEIGHT_BITS[backbone.weights] // 8
    more = 2 * FLOAT if backbone.asymmetric else FLOAT
    return int(footprint.step_nbytes * (1 + more / (block + FLOAT)))
