"""What a bundle costs by the STEM paper's model: the figures of `stem-edge inspect --cost`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from stem_edge.bundle import TOKENIZER, Bundle, open_bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.measuring.cost import (
    Counting,
    CurvePoint,
    HeapsFit,
    LayerShape,
    ModelCost,
    Pair,
    ffn_loads,
    ffn_multiply_adds,
    ffn_row_values,
    fit_heaps,
    layer_loads,
    layer_multiply_adds,
    model_cost,
    usage_curve,
)

USUAL_CONTEXT = 4096  # where the paper gives its saving fractions, and what `load` takes at most
READ_CHARS = 1 << 20


@dataclass(frozen=True)
class LayerCost:
    """One layer and one token, after `context_length` tokens, batch of 1.

    The paper's layer has attention as wide as the model; the built one is the bundle's.
    """

    ffn_multiply_adds: Pair
    ffn_parameter_loads: Pair
    ffn_row_values: Pair
    paper_multiply_adds: Pair
    paper_loads: Pair
    built_multiply_adds: Pair
    built_loads: Pair


@dataclass(frozen=True)
class CostReport:
    """All figures of one bundle at one context length; the curve only with a text."""

    bundle: Bundle
    context_length: int
    layer: LayerCost
    model: ModelCost
    text: Path | None
    curve: list[CurvePoint]
    heaps: HeapsFit | None


def cost_report(
    path: str | Path, context_length: int | None, text: str | Path | None
) -> CostReport:
    """Work out the costs of a bundle. Raises BundleError, InputError."""
    bundle = open_bundle(path)
    model, tables = bundle.manifest.model, bundle.manifest.table_format
    length = _context(context_length, model)
    source = Path(text) if text is not None else None
    record_nbytes = tables.mean_record_nbytes if tables else 0
    curve = usage_curve(_token_ids(bundle, source), model, record_nbytes) if source else []
    return CostReport(
        bundle=bundle,
        context_length=length,
        layer=_layer_cost(model, length),
        model=model_cost(model),
        text=source,
        curve=curve,
        heaps=fit_heaps(curve),
    )


def _context(wanted: int | None, model: ModelConfig) -> int:
    context = min(model.max_context, USUAL_CONTEXT) if wanted is None else wanted
    if not 1 <= context <= model.max_context:
        raise InputError(
            f"context length is {context}; this model takes 1 to {model.max_context}: "
            "give --context-length in that range"
        )
    return context


def _layer_cost(model: ModelConfig, length: int) -> LayerCost:
    paper, built = LayerShape.as_paper(model.dim, model.d_ff), LayerShape.of(model)
    return LayerCost(
        ffn_multiply_adds=ffn_multiply_adds(built),
        ffn_parameter_loads=ffn_loads(built),
        ffn_row_values=ffn_row_values(built),
        paper_multiply_adds=_per_token(layer_multiply_adds(paper, length), length),
        paper_loads=layer_loads(paper, length),
        built_multiply_adds=_per_token(layer_multiply_adds(built, length), length),
        built_loads=layer_loads(built, length),
    )


def _per_token(total: Pair, length: int) -> Pair:
    """Exact: every term of F_train has the length as a factor."""
    return Pair(total.dense // length, total.stem // length)


def _token_ids(bundle: Bundle, path: Path) -> list[int]:
    """Ids of a text, without special tokens; in pieces that end with a line, because a tokenizer
    takes a hundred bytes for a character."""
    from stem_edge.runtime.text import TextCodec

    codec = TextCodec(bundle.file(TOKENIZER))
    ids: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(READ_CHARS):
                ids += codec.encode("".join(lines), add_special_tokens=False)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read ({error}); give a text in UTF-8") from None
    if not ids:
        raise InputError(f"{path}: no token in it, expected at least 1; give a longer text")
    return ids


def cost_figures(report: CostReport) -> dict[str, object]:
    """The report as plain JSON values."""
    layer = {name: _pair_figures(pair) for name, pair in vars(report.layer).items()}
    model = report.model
    return {
        "context_length": report.context_length,
        "batch": 1,
        "layer": layer,
        "model": {"paper": _counts(model.paper), "stored": _counts(model.stored)},
        "text": str(report.text) if report.text else None,
        "curve": [asdict(point) for point in report.curve],
        "heaps": asdict(report.heaps) if report.heaps else None,
    }


def _pair_figures(pair: Pair) -> dict[str, object]:
    fraction = pair.saving_fraction if pair.dense else None
    return asdict(pair) | {"saved": pair.saved, "saving_fraction": fraction}


def _counts(counting: Counting) -> dict[str, object]:
    parameters = {f"{name}_parameters": count for name, count in asdict(counting).items()}
    gflop = {"dense_gflop_per_token": counting.dense_gflop, "gflop_per_token": counting.gflop}
    return parameters | gflop
