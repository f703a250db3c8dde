"""Whether a new bundle is good enough, and what its manifest says about that.

The bundle is asked as a user loads it, through the package's front door; the numpy reference model
on the checkpoint says what it should compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

import stem_edge
from stem_edge.bundle.manifest import (
    BACKBONE_FILES,
    FORMAT_VERSION,
    MANIFEST,
    TABLES,
    Manifest,
    encode_manifest,
)
from stem_edge.bundle.prefill_check import mean_divergence
from stem_edge.bundle.quality_report import KindError, QualityReport
from stem_edge.errors import ExportError
from stem_edge.export.backbone.onnx import PREFILL_STEP, planned_format
from stem_edge.export.job.files import write_file
from stem_edge.export.job.job import Job
from stem_edge.export.job.journal import Journal
from stem_edge.export.quantization.error_meter import errors
from stem_edge.files import disk
from stem_edge.graph.formats import BackboneFormat, GgufFormat
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.quantize import F32

# Engine -> what to try when the result is not good enough: nothing is quantized; more bits.
EXACT = {"onnxruntime": "--backbone fp32 --tables fp32", "ggml": "--backbone f32 --tables fp32"}
BETTER = {
    "onnxruntime": "(--backbone int8, --tables int8), smaller blocks (--block-size 32)",
    "ggml": "(--backbone q6_k, --tables int8), a text that weights channels (--calibration FILE)",
}
# Reruns on other processors differ in the last digits of a sum; the report does not.
DIGITS = 3


def accept(
    job: Job, journal: Journal, peaks: dict[str, F32], ids: list[int], expected: F32
) -> Manifest:
    """The manifest of an export whose steps are done, with what the new bundle computes.

    A prefill graph that is less exact than the other graphs goes, unless it was asked for. Raises
    ExportError for a bundle that diverges from its checkpoint more than is allowed.
    """
    options, format, notes = job.options, job.options.format, job.source.notes
    computed = _logits(job, _manifest(job, journal, format), ids)
    decode, prefill, apart = _compare(expected, computed), None, None
    greatest = decode["divergence"]
    if options.prefill:
        with_prefill = planned_format(job, peaks)
        by_prefill = _logits(job, _manifest(job, journal, with_prefill), ids)
        prefill = _compare(expected, by_prefill)["divergence"]
        if prefill > greatest and not options.prefill_graph:
            found = f"{prefill:g} nats, that of the other graphs {greatest:g}"
            notes += (f"no prefill graph: its divergence from the checkpoint was {found}",)
            journal.forget(PREFILL_STEP)
            prefill = None
        else:
            format, apart = with_prefill, _rounded(mean_divergence(computed, by_prefill))
            greatest = max(greatest, prefill)
    if options.max_kl is not None and greatest > options.max_kl:
        raise ExportError(
            f"{job.source.path}: the exported model's mean divergence from the checkpoint is "
            f"{greatest:g} nats over {len(ids)} tokens, max_kl allows {options.max_kl:g}; take more "
            f"bits {BETTER[options.runs_on]}, or allow more; nothing was exported"
        )
    return _manifest(
        job,
        journal,
        format,
        notes=notes,
        probe_tokens=tuple(ids),
        greatest_logit=_rounded(np.abs(expected).max()),
        prefill_divergence=prefill,
        prefill_from_decode=apart,
        **decode,
    )


def _logits(job: Job, manifest: Manifest, ids: list[int]) -> F32:
    """Logits [T, V] of the bundle with this manifest. Raises ExportError if they are no numbers."""
    path, engine = job.folder / MANIFEST, job.options.runs_on
    prefill = manifest.backbone is not None and manifest.backbone.prefill
    write_file(path, encode_manifest(manifest))
    try:
        with stem_edge.load(
            job.folder,
            threads=job.options.cpus,
            engine=engine,
            context_length=len(ids),
            prefill_graph=prefill if engine == "onnxruntime" else None,
            prepare=False,
            warm_start=False,
            trial=False,  # the exporter wrote it
        ) as model:
            found = model.logits(ids)
    finally:
        disk.remove(path)
    if not np.isfinite(found).all():
        raise ExportError(
            f"{job.folder}: the exported model computes NaN or infinite logits; "
            f"export with {EXACT[engine]} to see whether quantization is the cause"
        )
    return found


def _compare(expected: F32, found: F32) -> dict[str, float]:
    """Fields of the quality report: logits [T, V] against those of the checkpoint."""
    divergences = divergence(expected, found)
    return {
        "worst_logit_difference": _rounded(np.abs(found - expected).max()),
        "divergence": _rounded(divergences.mean()),
        "divergence_99": _rounded(np.percentile(divergences, 99)),
        "agreement": _rounded((found.argmax(axis=1) == expected.argmax(axis=1)).mean()),
    }


def _rounded(value: float | np.floating[Any]) -> float:
    """To as many digits as a report shows."""
    return float(f"{value:.{DIGITS}g}")


def _manifest(
    job: Job, journal: Journal, format: BackboneFormat | GgufFormat, **measured: Any
) -> Manifest:
    """measured: fields of the quality report."""
    base = job.base.manifest if job.base else None
    backbone, gguf = (base.backbone, base.gguf) if base else (None, None)
    match format:
        case BackboneFormat() as backbone:
            pass
        case GgufFormat() as gguf:
            pass
    tables = job.tables.format if job.tables else None
    engine, files = job.options.runs_on, journal.files()
    report = QualityReport(
        checkpoint_nbytes=job.source.nbytes,
        backbone_nbytes=sum(e.nbytes for n, e in files.items() if n in BACKBONE_FILES[engine]),
        tables_nbytes=sum(e.nbytes for n, e in files.items() if n.startswith(TABLES + "/")),
        errors=_errors(job, journal),
        probe_tokens=(),
        worst_logit_difference=0.0,
        greatest_logit=0.0,
        divergence=0.0,
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        model=job.source.config,
        backbone=backbone,
        gguf=gguf,
        tables=tables.tables if tables else None,
        rare_tables=tables.rare_tables if tables else None,
        indexed=tables is not None and tables.indexed,
        files=files,
        reports=(base.reports if base else {}) | {engine: replace(report, **measured)},
    )


def _errors(job: Job, journal: Journal) -> dict[str, KindError]:
    """Tables that were there before have the errors that they had when they were written."""
    found = errors(step.totals for step in journal.steps.values())
    if job.base is not None:
        before = job.base.manifest.report.errors
        found |= {kind: e for kind, e in before.items() if kind.startswith("tables")}
    return dict(sorted(found.items()))
