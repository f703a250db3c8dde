"""Does the new bundle compute what the checkpoint computes? Asked of the bundle as a user loads it,
through the package's front door, with the numpy reference model on the checkpoint as the oracle."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

import stem_edge
from stem_edge.bundle import QualityReport
from stem_edge.errors import ExportError
from stem_edge.export.checkpoint import Checkpoint
from stem_edge.reference import forward

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 0123456789"
PROBE_TOKENS = 12
# Reruns on other processors differ in the last digits of a sum; the report does not.
DIGITS = 3


def compare_logits(
    folder: Path, checkpoint: Checkpoint, report: QualityReport, threads: int
) -> QualityReport:
    """The report with the greatest logit difference over a few tokens of text."""
    with stem_edge.load(folder, threads=threads) as model:
        ids = model.tokenize(PROBE_TEXT)[: min(PROBE_TOKENS, model.plan.context_length)]
        found = model.logits(ids)
    expected = forward(checkpoint.config, checkpoint.backbone, checkpoint.tables, ids)
    if not np.isfinite(found).all():
        raise ExportError(
            f"{checkpoint.path}: the exported model computes NaN or infinite logits; "
            "export with --backbone fp32 --tables fp32 to see whether quantization is the cause"
        )
    return msgspec.structs.replace(
        report,
        probe_tokens=tuple(ids),
        worst_logit_difference=_rounded(np.abs(found - expected).max()),
        greatest_logit=_rounded(np.abs(expected).max()),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
