"""`stem-edge inspect --cost` for people, in 80 columns."""

from __future__ import annotations

from stem_edge.measuring.cost import CurvePoint, LayerShape, Pair
from stem_edge.measuring.cost_report import CostReport
from stem_edge.units import format_size

LABEL, NUMBER = 41, 12
VARIANT = "The paper's formulas are of plain STEM layers; the rows `as built` are of this model's."
DENSE = "This model is dense: the column STEM FFN says what one of its layers would cost."
NO_CURVE = "--text FILE adds: distinct row parameters by context length (section 3.2.5)"


def cost_table(report: CostReport) -> str:
    """Every figure with its unit and the section of the paper that counts it."""
    sections = [_heading(report), _layer(report), _model(report), _differences(report)]
    sections.append(_curve(report) if report.curve else [NO_CURVE])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _heading(report: CostReport) -> list[str]:
    model = report.bundle.manifest.model
    widths = f"d = {model.dim:,} (model width), d_ff = {model.d_ff:,} (FFN width)"
    stem = f"|S| = {len(model.stem_layers)} of {model.n_layers} are STEM layers"
    lines = [
        str(report.bundle.path),
        "",
        "Cost by the formulas of the STEM paper (arXiv 2601.10639), batch of 1, with",
        f"{widths}, V = {model.vocab_size:,} tokens,",
        f"L = {report.context_length:,} tokens of context (--context-length); {stem}.",
    ]
    if not model.stem_layers:
        return [*lines, DENSE]
    return lines if model.stem_ffn == "stem" and not model.row_rank else [*lines, VARIANT]


def _layer(report: CostReport) -> list[str]:
    layer = report.layer
    return [
        _line("ONE LAYER", "dense FFN", "STEM FFN", "saved"),
        "FFN alone (Table 1)",
        _pair("multiply-adds a token, 3 d d_ff + d_ff", layer.ffn_multiply_adds),
        _pair("parameters loaded a decode step", layer.ffn_parameter_loads),
        _pair("row values moved a decode step, d_ff", layer.ffn_row_values),
        "FFN and attention as the paper has it, 4 d^2 + 2 L d + 3 d d_ff (section 3.2.3)",
        _pair("multiply-adds a token, F_train / L", layer.paper_multiply_adds),
        _pair("values loaded a decode step, M_dec", layer.paper_loads),
        _saving(layer.paper_loads, ", d_ff / (4 d + 2 L + 3 d_ff)"),
        f"FFN and attention as built, {_heads(report)}, with its KV cache",
        _pair("multiply-adds a token", layer.built_multiply_adds),
        _saving(layer.built_multiply_adds),
        _pair("values loaded a decode step", layer.built_loads),
        _saving(layer.built_loads),
    ]


def _model(report: CostReport) -> list[str]:
    paper, stored = report.model.paper, report.model.stored
    return [
        _line("WHOLE MODEL (Table 3)", "", "in paper", "in bundle"),
        "this model",
        _counts("parameters in all", paper.total, stored.total),
        _counts("active parameters a token", paper.active, stored.active),
        _line("  GFLOP a token, 2 x active", "", *_gflops(paper.gflop, stored.gflop)),
        "its dense twin, with up projections and no tables",
        _counts("parameters in all", paper.dense_total, stored.dense_total),
        _counts("active parameters a token", paper.dense_active, stored.dense_active),
        _line("  GFLOP a token, 2 x active", "", *_gflops(paper.dense_gflop, stored.dense_gflop)),
    ]


def _differences(report: CostReport) -> list[str]:
    paper, stored = report.model.paper, report.model.stored
    shape = LayerShape.of(report.bundle.manifest.model)
    kept, embedding = paper.total - stored.total, paper.active - stored.active
    lines = ["Where the paper's counts differ from this bundle, and from each other:"]
    if kept:
        lines += [
            f"- Its total keeps the {kept:,} parameters of the up projections that",
            "  tables replace; no bundle stores them.",
        ]
    if embedding:
        lines += [
            f"- It calls the whole embedding active. A token uses one row: {embedding:,}",
            "  parameters less, and no multiplication.",
        ]
    if (shape.queries, shape.keys) != (shape.dim, shape.dim):
        lines += [
            f"- It takes queries, keys and values to be d wide. Here queries are {shape.queries:,}",
            f"  wide, keys and values {shape.keys:,}.",
        ]
    return [
        *lines,
        "- Table 1 counts a multiply-add as one FLOP, Table 3 as two; Table 3 leaves out",
        "  attention over the context.",
    ]


def _curve(report: CostReport) -> list[str]:
    lines = [
        f"DISTINCT ROW PARAMETERS of {report.text} (section 3.2.5)",
        f"{'L':>13}{'L_uniq':>13}{'|S| d_ff L_uniq':>22}{'rows from flash':>18}",
        f"{'tokens':>13}{'distinct':>13}{'row parameters':>22}{'each read once':>18}",
        *map(_point, report.curve),
    ]
    if report.heaps:
        scale, exponent = report.heaps.scale, report.heaps.exponent
        lines.append(
            f"L_uniq ~ {scale:.3g} L^{exponent:.3f} (Heaps' law, least squares in log-log)"
        )
    return lines


def _point(point: CurvePoint) -> str:
    nbytes = format_size(point.flash_nbytes)
    return f"{point.length:>13,}{point.distinct:>13,}{point.row_parameters:>22,}{nbytes:>18}"


def _line(label: str, *columns: str) -> str:
    return " ".join([f"{label:<{LABEL}}", *(f"{column:>{NUMBER}}" for column in columns)]).rstrip()


def _pair(label: str, pair: Pair) -> str:
    return _line(f"  {label}", f"{pair.dense:,}", f"{pair.stem:,}", f"{pair.saved:,}")


def _saving(pair: Pair, formula: str = "") -> str:
    return _line(f"  saving{formula}", "", "", f"{pair.saving_fraction:.1%}")


def _counts(label: str, paper: int, stored: int) -> str:
    return _line(f"  {label}", "", f"{paper:,}", f"{stored:,}")


def _gflops(paper: float, stored: float) -> tuple[str, str]:
    return f"{paper:.3g}", f"{stored:.3g}"


def _heads(report: CostReport) -> str:
    model = report.bundle.manifest.model
    return f"{model.n_heads} heads, {model.n_kv_heads} for keys and values"
