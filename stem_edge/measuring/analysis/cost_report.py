"""Report of `stem-edge inspect --cost`: costs of a bundle by the STEM paper's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.analysis.cost import (
    CurvePoint,
    LayerShape,
    Pair,
    ffn_loads,
    ffn_multiply_adds,
    fit_heaps,
    layer_loads,
    layer_multiply_adds,
    model_cost,
    usage_curve,
)
from stem_edge.measuring.workload import read_ids
from stem_edge.text_table import table, wrapped
from stem_edge.units import format_size

USUAL_CONTEXT = 4096  # of the paper's saving fractions, and the most that `load` takes by default
VARIANT = "The paper's formulas are for plain STEM layers; the rows `as built` are for this model."
DENSE = "This model is dense: the column STEM FFN shows what a STEM layer of its shape would cost."
DIFFERENCES = (
    "The paper's total keeps the up projections that tables replace; no bundle stores them. It calls "
    "the whole embedding active, of which a token uses a row, and has queries, keys and values as wide "
    "as the model. Table 1 counts a multiply-add as one FLOP, Table 3 as two; Table 3 leaves out "
    "attention over the context."
)
NO_CURVE = "--text FILE adds: distinct row parameters by context length (section 3.2.5)"


@dataclass(frozen=True)
class CostReport:
    """Costs of a bundle for one token at a context length, batch of 1; the curve only with a text."""

    bundle: Bundle
    context_length: int
    text: str | None
    curve: list[CurvePoint]

    @property
    def layer(self) -> dict[str, Pair]:
        """Costs of a layer as in the paper, and as it is built."""
        model, length = self.bundle.manifest.model, self.context_length
        paper, built = LayerShape.as_paper(model.dim, model.d_ff), LayerShape.of(model)
        return {
            "ffn_multiply_adds": ffn_multiply_adds(built),
            "ffn_parameter_loads": ffn_loads(built),
            "ffn_row_values": Pair(0, built.row_values),
            "paper_multiply_adds": layer_multiply_adds(paper, length),
            "paper_loads": layer_loads(paper, length),
            "built_multiply_adds": layer_multiply_adds(built, length),
            "built_loads": layer_loads(built, length),
        }


def cost_report(
    path: str | Path,
    context_length: int | None,
    text: str | Path | None,
    tables: str | None = None,
) -> CostReport:
    """Count the costs of a bundle. tables: URL of its shards, if they are elsewhere.

    Raises BundleError, InputError.
    """
    bundle = open_bundle(path, tables)
    model, format = bundle.manifest.model, bundle.manifest.table_format
    if not model.plain:
        raise InputError(
            f"{bundle.path}: costs are counted for STEM layers, which this model does not have; "
            "stem-edge measure shows what it takes"
        )
    if context_length is None:
        context_length = min(model.max_context, USUAL_CONTEXT)
    if not 1 <= context_length <= model.max_context:
        raise InputError(
            f"context length is {context_length}; this model takes 1 to {model.max_context}: "
            "give --context-length in that range"
        )
    curve = []
    if text is not None:
        ids = read_ids(Path(text), bundle, special=False)
        curve = usage_curve(ids, model, format.mean_record_nbytes if format else 0)
    return CostReport(bundle, context_length, None if text is None else str(text), curve)


def cost_figures(report: CostReport) -> dict[str, object]:
    """Return the report as plain JSON values."""
    model, heaps = model_cost(report.bundle.manifest.model), fit_heaps(report.curve)
    return {
        "context_length": report.context_length,
        "batch": 1,
        "layer": {name: pair.figures() for name, pair in report.layer.items()},
        "model": {name: counts.figures() for name, counts in model._asdict().items()},
        "text": report.text,
        "curve": [point._asdict() for point in report.curve],
        "heaps": heaps._asdict() if heaps else None,
    }


def cost_table(report: CostReport) -> str:
    """Return a table of all figures, with their units and sections of the paper."""
    sections = [_heading(report), _counted(report), wrapped(DIFFERENCES), _curve(report)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _heading(report: CostReport) -> list[str]:
    model = report.bundle.manifest.model
    stem = f"|S| = {len(model.stem_layers)} of {model.n_layers} are STEM layers"
    lines = [
        str(report.bundle.path),
        "",
        "Cost by the formulas of the STEM paper (arXiv 2601.10639), batch of 1, with",
        f"d = {model.dim:,} (model width), d_ff = {model.d_ff:,} (FFN width), V = {model.vocab_size:,} tokens,",
        f"L = {report.context_length:,} tokens of context (--context-length); {stem}.",
    ]
    if not model.stem_layers:
        return [*lines, DENSE]
    plain = model.stem_ffn == "stem" and not (model.row_rank or model.row_experts)
    return lines if plain else [*lines, VARIANT]


def _counted(report: CostReport) -> list[str]:
    """Return costs of a layer, then of the whole model, in the same columns."""
    layer, model = report.layer, report.bundle.manifest.model
    heads = f"{model.n_heads} heads, {model.n_kv_heads} for keys and values"
    # Headings are not cells, so that they span the columns instead of widening the first.
    rows: list[tuple[str, ...] | str] = [
        ("ONE LAYER", "dense FFN", "STEM FFN", "saved"),
        "FFN alone (Table 1)",
        _pair("multiply-adds a token, 3 d d_ff + d_ff", layer["ffn_multiply_adds"]),
        _pair("parameters loaded a decode step", layer["ffn_parameter_loads"]),
        _pair("row values moved a decode step, d_ff", layer["ffn_row_values"]),
        "FFN and attention as in the paper, 4 d^2 + 2 L d + 3 d d_ff (section 3.2.3)",
        _pair("multiply-adds a token, F_train / L", layer["paper_multiply_adds"]),
        _pair("values loaded a decode step, M_dec", layer["paper_loads"]),
        _saving(layer["paper_loads"], ", d_ff / (4 d + 2 L + 3 d_ff)"),
        f"FFN and attention as built, {heads}, with its KV cache",
        _pair("multiply-adds a token", layer["built_multiply_adds"]),
        _saving(layer["built_multiply_adds"]),
        _pair("values loaded a decode step", layer["built_loads"]),
        _saving(layer["built_loads"]),
        "",
        ("WHOLE MODEL (Table 3)", "", "in paper", "in bundle"),
        "this model",
        *_compared(report, ""),
        "its dense twin, with up projections and no tables",
        *_compared(report, "dense_"),
    ]
    lines = iter(table([row for row in rows if not isinstance(row, str)]))
    return [row if isinstance(row, str) else next(lines) for row in rows]


def _compared(report: CostReport, prefix: str) -> Iterator[tuple[str, ...]]:
    """Yield figures of a model as the paper counts them, and as they are in the bundle."""
    cost = model_cost(report.bundle.manifest.model)
    for label, name, form in (
        ("parameters in all", "total", ","),
        ("active parameters a token", "active", ","),
        ("GFLOP a token, 2 x active", "gflop", ".3g"),
    ):
        yield (f"  {label}", "", *(format(getattr(each, prefix + name), form) for each in cost))


def _curve(report: CostReport) -> Iterator[str]:
    if not report.curve:
        yield NO_CURVE
        return
    yield f"DISTINCT ROW PARAMETERS of {report.text} (section 3.2.5)"
    rows: list[tuple[str, ...]] = [
        ("L", "L_uniq", "|S| d_ff L_uniq", "rows from flash"),
        ("tokens", "distinct", "row parameters", "each read once"),
    ]
    rows += [(*(f"{n:,}" for n in counts), format_size(read)) for *counts, read in report.curve]
    yield from table(rows, "r")
    if heaps := fit_heaps(report.curve):
        yield (
            f"L_uniq ~ {heaps.scale:.3g} L^{heaps.exponent:.3f} (Heaps' law, least squares in log-log)"
        )


def _pair(label: str, pair: Pair) -> tuple[str, ...]:
    return (f"  {label}", f"{pair.dense:,}", f"{pair.stem:,}", f"{pair.saved:,}")


def _saving(pair: Pair, formula: str = "") -> tuple[str, ...]:
    return (f"  saving{formula}", "", "", f"{pair.saving_fraction:.1%}")
