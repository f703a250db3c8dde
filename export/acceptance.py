"""Whether a new bundle is good enough, and what its manifest says about that."""

from __future__ import annotations

import msgspec
import numpy as np

from stem_edge import disk
from stem_edge.bundle import (
    BACKBONE_FILES,
    FORMAT_VERSION,
    MANIFEST,
    TABLES,
    KindError,
    Manifest,
    QualityReport,
    encode_manifest,
)
from stem_edge.export.files import write_file
from stem_edge.export.job import Job
from stem_edge.export.journal import Journal
from stem_edge.export.onnx_backbone import PREFILL_STEP, planned_format
from stem_edge.export.probe import check_divergence, compare, compute_logits, rounded
from stem_edge.export.report import errors
from stem_edge.formats import BackboneFormat, EngineName, GgufFormat
from stem_edge.prefill_check import mean_divergence
from stem_edge.quantize import F32


class Acceptance:
    """The end of an export: its steps are done, its manifest is not written."""

    def __init__(self, job: Job, journal: Journal, peaks: dict[str, F32]) -> None:
        self.job, self.journal, self._peaks = job, journal, peaks
        self.folder, self.source, self.options = job.folder, job.source, job.options
        self.engine = job.options.runs_on

    def compare(self, ids: list[int], expected: F32) -> Manifest:
        """The manifest with what the new bundle computes, as a user would load it.

        A prefill graph that is less exact than the other graphs goes, unless it was asked for.
        """
        computed = self._compute(ids, prefill=False)
        decode = compare(expected, computed)
        notes, prefill, apart = self.source.notes, None, None
        if self.options.prefill:
            by_prefill = self._compute(ids, prefill=True)
            prefill = compare(expected, by_prefill)
            apart = rounded(mean_divergence(computed, by_prefill))
            if prefill.divergence > decode.divergence and not self.options.prefill_graph:
                found = (
                    f"{prefill.divergence:g} nats, that of the other graphs {decode.divergence:g}"
                )
                notes += (f"no prefill graph: its divergence from the checkpoint was {found}",)
                self.journal.forget(PREFILL_STEP)
                prefill = apart = None
        greatest = max(found.divergence for found in (decode, prefill) if found)
        check_divergence(
            greatest, self.options.max_kl, self.source.path, len(ids), engine=self.engine
        )
        manifest = self._manifest(prefill=prefill is not None)
        report = msgspec.structs.replace(
            manifest.reports[self.engine],
            notes=notes,
            probe_tokens=tuple(ids),
            worst_logit_difference=decode.worst_difference,
            greatest_logit=float(f"{np.abs(expected).max():.3g}"),
            divergence=decode.divergence,
            prefill_divergence=prefill.divergence if prefill else None,
            prefill_from_decode=apart,
            divergence_99=decode.divergence_99,
            agreement=decode.agreement,
        )
        return msgspec.structs.replace(manifest, reports=manifest.reports | {self.engine: report})

    def _compute(self, ids: list[int], *, prefill: bool) -> F32:
        path = self.folder / MANIFEST
        write_file(path, encode_manifest(self._manifest(prefill=prefill)))
        try:
            return compute_logits(
                self.folder,
                ids,
                self.options.cpus,
                engine=self.engine,
                prefill_graph=prefill,
            )
        finally:
            disk.remove(path)

    def _manifest(self, *, prefill: bool) -> Manifest:
        base, plan = self.job.base, self.job.tables
        format = plan.format if plan else None
        backbone, gguf = (base.manifest.backbone, base.manifest.gguf) if base else (None, None)
        reports: dict[EngineName, QualityReport] = dict(base.manifest.reports) if base else {}
        match self.options.format:
            case BackboneFormat():
                backbone = planned_format(self.job, self._peaks)
                if not prefill:
                    backbone = msgspec.structs.replace(backbone, prefill=False, balanced=())
            case GgufFormat() as gguf:
                pass
        return Manifest(
            format_version=FORMAT_VERSION,
            model=self.source.config,
            backbone=backbone,
            gguf=gguf,
            tables=format.tables if format else None,
            rare_tables=format.rare_tables if format else None,
            indexed=format is not None and format.indexed,
            files=self.journal.files(),
            reports=reports | {self.engine: self._report()},
        )

    def _report(self) -> QualityReport:
        """With what was measured while writing."""
        files = self.journal.files()
        backbone = [name for name in BACKBONE_FILES[self.engine] if name in files]
        return QualityReport(
            checkpoint_nbytes=self.source.nbytes,
            backbone_nbytes=sum(files[name].nbytes for name in backbone),
            tables_nbytes=sum(e.nbytes for n, e in files.items() if n.startswith(TABLES + "/")),
            errors=self._errors(),
            probe_tokens=(),
            worst_logit_difference=0.0,
            greatest_logit=0.0,
            divergence=0.0,
        )

    def _errors(self) -> dict[str, KindError]:
        """Tables that were there before have the errors that they had when they were written."""
        found = errors(step.totals for step in self.journal.steps.values())
        if self.job.base is not None:
            before = self.job.base.manifest.report.errors
            found |= {kind: e for kind, e in before.items() if kind.startswith("tables")}
        return dict(sorted(found.items()))
