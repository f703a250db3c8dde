"""Compares a new bundle with its checkpoint, and reports the result in the manifest.

The bundle is loaded and run as users do it. The numpy reference model computes the
expected logits from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import numpy as np

from stem_edge.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TABLES,
    Manifest,
    QualityReport,
    encode_manifest,
)
from stem_edge.errors import ExportError, FarError
from stem_edge.export.job.files import Output, write_file
from stem_edge.export.job.plan import Format, Plan
from stem_edge.export.job.recipe import BETTER, EXACT, FAR
from stem_edge.export.quantization.exact_model import exact_logits
from stem_edge.files import disk
from stem_edge.graph.formats import PREFILL_DATA
from stem_edge.numerics.distributions import divergence, side_by_side
from stem_edge.numerics.quantize import F32

if TYPE_CHECKING:
    from stem_edge.runtime.model import Model

PREPARED = ".prepared"  # temporary folder in the bundle, for a prepared backbone
# Few digits, so that reports agree across processors, whose sums differ in the last digits.
DIGITS = 3
LARGE_NBYTES = 500_000_000  # larger bundles are prepared: takes seconds, but less memory
EXACT_VALUES = 1 << 25  # logits of the checkpoint that are in memory at once


def accept(plan: Plan, out: Output, written: Format, ids: list[int], exact: F32 | None) -> Manifest:
    """Compare the new bundle with its checkpoint, and return its manifest.

    A prefill graph that is less exact than the decoding graph is deleted, unless the recipe asks for it.
    written: format of the backbone as written, with its prefill graph if any. ids: tokens to compare on.
    exact: the checkpoint's hidden states [T, hidden_width] before the head; None: do not compare.
    Raises FarError if the bundle diverges from its checkpoint by more than the recipe allows.
    """
    format, notes, prefill = plan.format, plan.source.notes, None
    if exact is None:
        return _manifest(plan, out, format, notes=notes)
    with _loaded(plan, out, written if plan.prefill else format, len(ids)) as model:
        model.engine.uses_prefill = False
        decode = _compare(plan, exact, _logits(plan, model, ids))
        greatest = decode["divergence"]
        if plan.prefill:
            model.engine.uses_prefill = True
            prefill = _compare(plan, exact, _logits(plan, model, ids))["divergence"]
    if prefill is not None:
        if prefill > greatest and not plan.recipe.prefill_graph:
            found = f"{prefill:g} nats, that of the decoding graph {greatest:g}"
            notes += (f"no prefill graph: its divergence from the checkpoint was {found}",)
            out.remove(PREFILL_DATA)
            prefill = None
        else:
            format, greatest = written, max(greatest, prefill)
    _check_divergence(plan, greatest, len(ids))
    return _manifest(
        plan,
        out,
        format,
        notes=notes,
        probe_tokens=tuple(ids),
        prefill_divergence=prefill,
        **decode,
    )


def _check_divergence(plan: Plan, found: float, tokens: int) -> None:
    recipe = plan.recipe
    if found > recipe.bound:
        allowed = (
            f"at most {FAR:g} is the same model"
            if recipe.max_kl is None
            else f"max_kl allows {recipe.bound:g}"
        )
        raise FarError(
            f"{plan.source.path}: the exported model's mean divergence from the checkpoint is "
            f"{found:g} nats over {tokens} tokens, {allowed}; take more bits "
            f"({BETTER[recipe.engine]}), or raise max_kl; nothing was exported"
        )


@contextmanager
def _loaded(plan: Plan, out: Output, format: Format, tokens: int) -> Iterator[Model]:
    """Load the bundle with a context of `tokens` tokens. Large weights are mapped from a file, to save memory."""
    # Imported only here, because an export needs nothing else of the runtime.
    from stem_edge.runtime.backends.options import LoadOptions
    from stem_edge.runtime.loading import load_with

    path, prepared = out.folder / MANIFEST, out.folder / PREPARED
    backbone = sum(entry.nbytes for name, entry in out.files.items() if name in format.files)
    write_file(path, encode_manifest(_manifest(plan, out, format)))
    options = LoadOptions(
        threads=plan.recipe.cpus,
        engine=plan.recipe.engine,
        context_length=tokens,
        weights="packed" if backbone < LARGE_NBYTES else "prepared",
        cache_dir=prepared,
        progress=False,
    )
    try:
        with load_with(out.folder, options) as model:
            yield model
    finally:
        disk.remove(path)
        rmtree(prepared, ignore_errors=True)


def _logits(plan: Plan, model: Model, ids: list[int]) -> Iterator[F32]:
    """Yield the bundle's logits in pieces [n, V]. Raises ExportError if they are not finite.

    Each piece overwrites the previous one, because all logits can need as much memory as the model.
    """
    for found in model.logits_chunks(ids):
        if not np.isfinite(found).all():
            raise ExportError(
                "the exported model computes NaN or infinite logits; export with --type "
                f"{EXACT[plan.recipe.engine]} --rows fp32 to see whether quantization is the cause"
            )
        yield found


def _compare(plan: Plan, exact: F32, pieces: Iterator[F32]) -> dict[str, float]:
    """Compare a bundle's logits with the checkpoint's; return fields of the QualityReport.

    exact: the checkpoint's last hidden states [T, hidden_width]; logits are computed from a few of them
    at a time, to save memory. pieces: the bundle's logits, in pieces [n, V].
    """
    each, same = list[F32](), 0
    step = max(1, EXACT_VALUES // plan.source.config.vocab_size)
    starts = range(0, len(exact), step)
    expected = (exact_logits(plan.source, exact[start : start + step]) for start in starts)
    for right, found in side_by_side([expected, pieces]):
        each.append(divergence(right, found))
        same += int((found.argmax(axis=1) == right.argmax(axis=1)).sum())
    divergences = np.concatenate(each)
    return {
        "divergence": _rounded(divergences.mean()),
        "divergence_99": _rounded(np.percentile(divergences, 99)),
        "agreement": _rounded(same / len(exact)),
    }


def _rounded(value: float | np.floating[Any]) -> float:
    return float(f"{value:.{DIGITS}g}")


def _manifest(plan: Plan, out: Output, format: Format, **measured: Any) -> Manifest:
    """Return a manifest for the files written so far. measured: fields of the QualityReport."""
    formats: dict[str, Any] = {format.field: format}
    files = out.files
    tables = plan.tables.format if plan.tables else None
    report = QualityReport(
        backbone_nbytes=sum(e.nbytes for n, e in files.items() if n in format.files),
        tables_nbytes=sum(e.nbytes for n, e in files.items() if n.startswith(TABLES + "/")),
        **measured,
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        model=plan.source.config,
        **formats,
        assistant=plan.assistant.described if plan.assistant else None,
        stored=tables.stored if tables else None,
        rare_tables=tables.rare_tables if tables else None,
        indexed=tables is not None and tables.indexed,
        sampling=plan.source.sampling,
        files=files,
        report=report,
    )
