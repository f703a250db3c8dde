"""The STEM paper's cost model, and cosines between rows: `stem-edge inspect --cost`, `--geometry`.

Costs are counted as in arXiv 2601.10639. There, a multiply-add is one FLOP in Table 1, and two FLOPs in Table 3.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError, InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.loading import open_or_make
from stem_edge.runtime.rows.table_arrays import Tables, open_tables
from stem_edge.special import dense_twin, is_plain
from stem_edge.text_table import table, wrapped

USUAL_CONTEXT = 4096  # of the paper's savings; also the most that `load` chooses by default
FFN_MATRICES = ("gate", "up", "down", "project", "router")
DENSE_MATRICES, STEM_MATRICES = 3, 2  # d x d_ff matrices of an FFN: gate, down; up only if dense
FLOPS_PER_PARAMETER = 2  # Table 3: a multiplication and an addition

SAMPLE = 2048  # rows of a layer whose cosines are computed: 2 million pairs
THRESHOLDS = (0.1, 0.3, 0.5)
BATCH_NBYTES = 4 << 20  # of records that are read at a time
LAYER_LABELS = {
    "ffn_multiply_adds": "FFN, multiply-adds (Table 1)",
    "ffn_parameter_loads": "  parameters loaded",
    "ffn_row_values": "  row values moved",
    "paper_multiply_adds": "layer in paper, multiply-adds (3.2.3)",
    "paper_loads": "  values loaded",
    "built_multiply_adds": "layer as built, multiply-adds",
    "built_loads": "  values loaded",
}
MODEL_LABELS = {
    "total_parameters": "parameters",
    "active_parameters": "  active",
    "gflop_per_token": "  GFLOP a token, 2 x active",
    "dense_total_parameters": "its dense twin, parameters",
    "dense_active_parameters": "  active",
    "dense_gflop_per_token": "  GFLOP a token",
}


def layer_costs(model: ModelConfig, length: int) -> dict[str, tuple[int, int]]:
    """Return the costs of one token in a layer: label -> (with a dense FFN, with a STEM FFN).

    "loads" are parameters, and values of the KV cache, that are read. As in the paper's Table 1 and section
    3.2.3, costs are for a batch of 1, and the token attends to all `length` tokens. In labels with "paper",
    attention has 4 d^2 parameters, and the STEM FFN 2 d d_ff.
    """
    dim, d_ff, layers = model.dim, model.d_ff, model.stem_layers
    dense, plain = DENSE_MATRICES * dim * d_ff, STEM_MATRICES * dim * d_ff
    stem, row, products = plain, d_ff, 0
    if layers:
        shapes = model.layer_shapes(layers[0])
        stem = sum(math.prod(shapes[name]) for name in FFN_MATRICES if name in shapes)
        row = model.record_values // len(model.row_layers)
        if model.n_experts or model.row_experts:  # a row is an expert's matrices, or rows are mixed
            products = row
    paper = 4 * dim**2 + 2 * length * dim
    queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
    built, loaded = (2 * (dim * (queries + keys) + length * width) for width in (queries, keys))
    return {
        "ffn_multiply_adds": (dense + d_ff, stem + d_ff + products),
        "ffn_parameter_loads": (dense, stem),
        "ffn_row_values": (0, row),
        "paper_multiply_adds": (paper + dense, paper + plain),
        "paper_loads": (paper + dense, paper + plain),
        "built_multiply_adds": (built + dense, built + stem + products),
        "built_loads": (loaded + dense, loaded + stem),
    }


def model_counts(model: ModelConfig) -> dict[str, dict[str, float]]:
    """Return parameter counts and GFLOP per token, as in the paper's Table 3 and as stored.

    The paper's total includes the up projections that tables replace, except in models with experts.
    The paper's active parameters include the whole embedding, although a token uses one row of it.
    """
    dense, backbone, tables = dense_twin(model), model.backbone_parameters, model.table_parameters
    twin = dense.backbone_parameters
    paper = (backbone if model.stem_ffn == "hash-moe" else twin) + tables
    counts = {
        "paper": (paper, backbone + model.record_values, twin, twin),
        "stored": (backbone + tables, model.active_parameters, twin, dense.active_parameters),
    }
    giga = FLOPS_PER_PARAMETER / 1e9
    return {
        where: dict(zip(MODEL_LABELS, (a, b, b * giga, c, d, d * giga), strict=True))
        for where, (a, b, c, d) in counts.items()
    }


def cost_figures(bundle: Bundle, context_length: int | None) -> dict[str, Any]:
    """Return costs of a token as JSON; default context: up to 4096 tokens. Raises InputError."""
    model = bundle.manifest.model
    if not is_plain(model):
        raise InputError(
            f"{bundle.path}: costs are counted for STEM layers, which this model does not have; "
            "stem-edge measure shows what it takes"
        )
    length = min(model.max_context, USUAL_CONTEXT) if context_length is None else context_length
    if not 1 <= length <= model.max_context:
        raise InputError(
            f"context length is {length}; this model takes 1 to {model.max_context}: "
            "give --context-length in that range"
        )
    return {
        "context_length": length,
        "layer": {name: _saving(*pair) for name, pair in layer_costs(model, length).items()},
        "model": model_counts(model),
    }


def _saving(dense: int, stem: int) -> dict[str, float | None]:
    share = (dense - stem) / dense if dense else None
    return {"dense": dense, "stem": stem, "saved": dense - stem, "saving_fraction": share}


def cost_table(bundle: Bundle, context_length: int | None) -> str:
    figures, model = cost_figures(bundle, context_length), bundle.manifest.model
    rows: list[tuple[str, ...]] = [("ONE LAYER", "dense FFN", "STEM FFN", "saved", "share")]
    for name, label in LAYER_LABELS.items():
        pair = figures["layer"][name]
        share = pair["saving_fraction"]
        counts = (f"{pair[key]:,}" for key in ("dense", "stem", "saved"))
        rows.append((label, *counts, "" if share is None else f"{share:.1%}"))
    rows += [("",), ("WHOLE MODEL (Table 3)", "in paper", "in bundle")]
    for name, label in MODEL_LABELS.items():
        form = ".3g" if "gflop" in name else ","
        rows.append((label, *(format(counts[name], form) for counts in figures["model"].values())))
    heading = (
        f"Cost of a token by the STEM paper (arXiv 2601.10639), batch of 1: d = {model.dim:,}, d_ff = "
        f"{model.d_ff:,}, V = {model.vocab_size:,}, L = {figures['context_length']:,} tokens of context, "
        f"|S| = {len(model.stem_layers)} of {model.n_layers} layers. Table 1 counts a multiply-add as "
        "one FLOP, Table 3 as two, without attention. The paper's total keeps the up projections "
        "that tables replace, and its active parameters have the whole embedding."
    )
    return "\n".join([str(bundle.path), "", *wrapped(heading), "", *table(rows)])


def geometry(path: str | Path) -> dict[str, Any]:
    """Measure norms of a bundle's table rows, and cosines between rows; return a JSON object.

    By section 5.1 of the paper, rows that are nearly orthogonal hardly disturb each other. Raises InputError
    unless the model has one row for each token, and BundleError if a row has NaN or infinite values.
    """
    bundle = open_or_make(path)
    _check_rows(bundle)
    count = bundle.manifest.model.vocab_size
    with open_tables(bundle.file(TABLES)) as tables:
        order, layers = np.random.default_rng(0).permutation(count), []
        for layer, lengths in zip(tables.layers, _all_lengths(tables, count), strict=True):
            chosen = np.sort(order[lengths[order] > 0][:SAMPLE])
            layers.append({"layer": layer} | layer_geometry(lengths, tables[chosen, layer]))
        width, kind = tables.layout.row_width, tables.kind
    return {
        "bundle": str(bundle.path),
        "tokens": count,
        "width": width,
        "row_type": kind,
        "sample": SAMPLE,
        # 95 % of random directions have a |cos| up to this.
        "random_p95_abs": min(1.0, NormalDist().inv_cdf(0.975) / math.sqrt(width)),
        "layers": layers,
    }


def geometry_table(found: dict[str, Any]) -> str:
    heading = (
        f"Cosines between rows of {found['width']} values ({found['row_type']}), all pairs of up to "
        f"{found['sample']:,} rows of a layer; lengths of all {found['tokens']:,} rows. A cosine near "
        "0 means nearly orthogonal: random directions have a P95 |cos| of "
        f"{found['random_p95_abs']:.3f}."
    )
    above = (f">{at:g}" for at in THRESHOLDS)
    rows = [("layer", "cos: mean", "P95 |cos|", *above, "length: least", "median", "most", "zero")]
    for one in found["layers"]:
        cosines, shares = ("-", "-"), ["-"] * len(THRESHOLDS)
        if one["mean"] is not None:  # 0.0 is added, because -0.0 would show its sign
            cosines = f"{round(one['mean'], 3) + 0.0:.3f}", f"{one['p95_abs']:.3f}"
            shares = [f"{share:.1%}" for share in one["share_above"].values()]
        lengths = (f"{length:.3g}" for length in one["lengths"] or (0, 0, 0))
        rows.append((str(one["layer"]), *cosines, *shares, *lengths, f"{one['zero_rows']:,}"))
    return "\n".join([found["bundle"], "", *wrapped(heading), "", *table(rows, "r")])


def layer_geometry(lengths: F32, sample: F32) -> dict[str, Any]:
    """Return statistics of a layer's row norms, and of the cosines between sampled rows.

    lengths: L2 norms [tokens]. sample: nonzero rows [n, width]. Statistics of too few rows are None.
    """
    present, cosines = lengths[lengths > 0], np.zeros(0, np.float32)
    if len(sample) > 1:
        units = sample / row_lengths(sample)[:, None]
        cosines = np.clip((units @ units.T)[np.triu_indices(len(units), 1)], -1, 1)
    some, size = len(cosines) > 0, np.abs(cosines)
    return {
        "zero_rows": len(lengths) - len(present),
        "lengths": np.percentile(present, (0, 50, 100)).tolist() if len(present) else None,
        "mean": float(cosines.mean(dtype=np.float64)) if some else None,
        "p95_abs": float(np.percentile(size, 95)) if some else None,
        "share_above": {str(at): float((size > at).mean()) for at in THRESHOLDS} if some else None,
    }


def row_lengths(rows: F32) -> F32:
    """Return the L2 norms [n] of rows [n, width]."""
    # As float64, because squares can overflow float32.
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1), np.float32)


def _all_lengths(tables: Tables, vocab_size: int) -> F32:
    """Return the L2 norms [layers, tokens] of all rows. Raises BundleError if one is not finite."""
    size = max(1, BATCH_NBYTES // max(tables.layout.record_nbytes, 4 * tables.layout.row_width))
    found = np.empty((len(tables.layers), vocab_size), np.float32)
    for at in range(0, vocab_size, size):
        records = tables.records(np.arange(at, min(at + size, vocab_size)))
        for number, layer in enumerate(tables.layers):
            lengths = row_lengths(tables.layout.unpack(records, number))
            if not np.isfinite(lengths).all():
                token = at + int(np.flatnonzero(~np.isfinite(lengths))[0])
                raise BundleError(
                    f"row of token {token} in layer {layer} has values that are not finite; "
                    "check the bundle with stem-edge verify, or export it again"
                )
            found[number, at : at + size] = lengths
    return found


def _check_rows(bundle: Bundle) -> None:
    """Raise InputError unless the model has one row for each token."""
    model, what = bundle.manifest.model, ""
    if not model.stem_layers:
        what = "a dense model has no tables"
    elif model.stem_ffn == "hash-moe":
        what = f"its rows are {model.n_experts} experts, which are matrices"
    elif model.ngram_order:
        what = "its rows belong to n-grams"
    if what:
        raise InputError(
            f"{bundle.path}: {what}; give the bundle of a model with a row for each token"
        )
