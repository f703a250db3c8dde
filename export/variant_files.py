"""Which variants of its graphs a bundle has, and their files: they follow from the graphs that decode.

So they can be written into any bundle with a backbone for onnxruntime (tools/add_variants.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from stem_edge import graph_io as io
from stem_edge.bundle import (
    MANIFEST,
    BackboneFormat,
    Bundle,
    FileEntry,
    Manifest,
    encode_manifest,
    open_bundle,
)
from stem_edge.config import ModelConfig
from stem_edge.device_rows import Activations, DeviceRows
from stem_edge.errors import ExportError
from stem_edge.export import portable
from stem_edge.export.adding import keep_file
from stem_edge.export.device_graphs import rows_graph, top_graph
from stem_edge.export.files import publish, write_file
from stem_edge.export.variants import derive, obstacle
from stem_edge.graph_io import VARIANTS, Variant
from stem_edge.rows import RecordLayout

NOTE = "no graphs for accelerators "  # begins a note that says why there are none


class VariantPlan(NamedTuple):
    """What will be written, and what a user should know about the rest."""

    variants: tuple[Variant, ...]
    notes: tuple[str, ...]


def plan_variants(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    wanted: tuple[Variant, ...] | None,
) -> VariantPlan:
    """Those that are wanted; None: all that can be. Raises ExportError if one cannot be."""
    reasons = {variant: _obstacle(variant, config, layout, format) for variant in VARIANTS}
    if wanted is not None:
        for variant in wanted:
            if reasons[variant]:
                raise ExportError(
                    f"variant {variant}: {reasons[variant]}; leave it out of variants, or take "
                    "--variants none"
                )
        return VariantPlan(tuple(v for v in VARIANTS if v in wanted), ())
    by_reason: dict[str, list[Variant]] = {}
    for variant, reason in reasons.items():
        by_reason.setdefault(reason, []).append(variant)
    possible = tuple(by_reason.pop("", ()))
    notes = [f"{NOTE}({', '.join(v)}): {r}" for r, v in by_reason.items()]
    return VariantPlan(possible, tuple(notes))


def _obstacle(
    variant: Variant, config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> str:
    find = portable.obstacle if variant == "portable" else obstacle
    return find(config, layout, format)


def write_variants(
    folder: Path,
    config: ModelConfig,
    layout: RecordLayout | None,
    variants: tuple[Variant, ...],
) -> dict[Path, FileEntry]:
    """Derive the graphs of some variants from those in a folder, into it."""
    names = io.decode_graphs(config) if variants else []
    plain = {
        n: onnx.load_model(str(folder / io.graph_file(n)), load_external_data=False) for n in names
    }
    written: dict[Path, FileEntry] = {}
    for variant in variants:
        if variant == "portable":
            made = {n: portable.lower(n, model, config, layout) for n, model in plain.items()}
        else:
            made = {n: derive(n, model, layout, variant) for n, model in plain.items()}
            made |= _served(config, layout, variant)
        for name, model in made.items():
            path = folder / io.graph_file(name, variant)
            written[path] = write_file(path, model.SerializeToString(deterministic=True))
    return written


def _served(
    config: ModelConfig, layout: RecordLayout | None, activations: Activations
) -> dict[str, onnx.ModelProto]:
    """Graphs that serve a device's memory."""
    rows = {io.ROWS: rows_graph(DeviceRows(layout, activations))} if layout is not None else {}
    return {**rows, io.TOP: top_graph(config)}


def add_variants(path: str | Path, wanted: Sequence[Variant] | None = None) -> Bundle:
    """Write variants into a bundle, in place of those that it has. Default: all that can be.

    The bundle is what it was until the new one is complete. Raises ExportError, BundleError.
    """
    out = Path(path)
    open_bundle(out)  # before anything is written beside it
    with publish(out, force=True) as work:
        base = open_bundle(out)
        manifest = base.manifest
        if manifest.backbone is None:
            raise ExportError(
                f"{out}: has no backbone for onnxruntime, whose graphs variants are; add one with: "
                "stem-edge export CHECKPOINT OUT --add"
            )
        asked = None if wanted is None else tuple(wanted)
        plan = plan_variants(manifest.model, manifest.tables, manifest.backbone, asked)
        kept = [n for n in manifest.files if n not in variant_files(manifest.model)]
        files = {n: manifest.files[n] for n in kept}
        for name in kept:
            keep_file(base, name, work.folder)
        written = write_variants(work.folder, manifest.model, manifest.tables, plan.variants)
        files |= {file.name: entry for file, entry in written.items()}
        format = msgspec.structs.replace(manifest.backbone, variants=plan.variants)
        changed = _changed(manifest, format, files, plan.notes)
        write_file(work.folder / MANIFEST, encode_manifest(changed))
    return open_bundle(out)


def variant_files(config: ModelConfig) -> set[str]:
    """Every file that a variant of a model's graphs can have."""
    return {io.graph_file(g, v) for v in VARIANTS for g in io.variant_graphs(config, v)}


def _changed(
    manifest: Manifest,
    format: BackboneFormat,
    files: dict[str, FileEntry],
    notes: tuple[str, ...],
) -> Manifest:
    report = manifest.reports["onnxruntime"]
    others = tuple(note for note in report.notes if not note.startswith(NOTE))
    nbytes = sum(entry.nbytes for name, entry in files.items() if ".onnx" in name)
    report = msgspec.structs.replace(report, backbone_nbytes=nbytes, notes=others + notes)
    reports = manifest.reports | {"onnxruntime": report}
    return msgspec.structs.replace(manifest, backbone=format, files=files, reports=reports)
