"""Geometry of the rows of tables, for `stem-edge inspect --geometry`: lengths and cosines.

By the STEM paper (section 5.1, figure 6), rows that are nearly orthogonal hardly disturb each other,
so that there is room for many facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.table_arrays import open_tables
from stem_edge.errors import InputError
from stem_edge.measuring.analysis.geometry_rows import (
    CosineSpread,
    all_norms,
    random_p95,
    read_rows,
    spread,
)
from stem_edge.numerics.quantize import F32, I64

SAMPLE = 2048
# No more, because these are 34 million cosines, all kept in memory.
LARGEST_SAMPLE = 8192


@dataclass(frozen=True)
class Norms:
    """Lengths of a layer's rows, except for zero rows."""

    least: float
    median: float
    greatest: float


@dataclass(frozen=True)
class LayerGeometry:
    """Geometry of the rows of a STEM layer."""

    layer: int
    zero_rows: int  # in the whole table; left out of everything else
    norms: Norms | None  # in the whole table; None if all rows are zero
    cosines: CosineSpread | None  # in the sample; None if fewer than two rows are not zero


@dataclass(frozen=True)
class Geometry:
    """Geometry of a bundle."""

    bundle: str
    tokens: int  # rows of each table
    width: int  # values of a row, as it is stored
    row_type: str
    sample: int  # most rows whose cosines were taken
    seed: int  # of their choice
    random_p95_abs: float  # P95 |cos| of random directions of this width
    layers: tuple[LayerGeometry, ...]


def geometry(
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    sample: int = SAMPLE,
    seed: int = 0,
    progress: bool | None = None,
) -> Geometry:
    """Measure how the rows of a bundle spread over directions. The tables are read once, as a whole.

    layers: STEM layers (all); sample: rows of a layer whose cosines are taken, pair by pair.
    progress: a bar on stderr (on a terminal).

    Raises InputError for a model without rows of tokens, a layer without a table, numbers out
    of range; BundleError.
    """
    bundle = open_bundle(path)
    root, count = bundle.file(TABLES), bundle.manifest.model.vocab_size
    chosen = _layers(bundle, layers)
    if not 2 <= sample <= LARGEST_SAMPLE:
        raise InputError(f"sample is {sample}; expected 2 to {LARGEST_SAMPLE}")
    if seed < 0:
        raise InputError(f"seed is {seed}; expected 0 or more")
    norms = all_norms(root, count, chosen, progress)
    with open_tables(root) as tables:
        width, row_type = tables.layout.row_width, tables.kind
    order = np.random.default_rng(seed).permutation(count)
    return Geometry(
        bundle=str(bundle.path),
        tokens=count,
        width=width,
        row_type=row_type,
        sample=sample,
        seed=seed,
        random_p95_abs=random_p95(width),
        layers=tuple(_of_layer(root, n, norms[n], order, sample) for n in chosen),
    )


def _of_layer(root: Path, layer: int, norms: F32, order: I64, sample: int) -> LayerGeometry:
    """Measure a layer. The sample is the first rows that are not zero, in `order` of tokens."""
    present = norms[norms > 0]
    zeros = len(norms) - len(present)
    if not len(present):
        return LayerGeometry(layer, zeros, None, None)
    lengths = Norms(*np.percentile(present, (0, 50, 100)).tolist())
    ids = np.sort(order[norms[order] > 0][:sample])
    return LayerGeometry(layer, zeros, lengths, spread(read_rows(root, ids, layer)))


def _layers(bundle: Bundle, wanted: Sequence[int] | None) -> list[int]:
    model = bundle.manifest.model
    if not model.stem_layers:
        raise InputError(
            f"{bundle.path}: a dense model has no tables, so there are no rows to look at; give "
            "the bundle of a STEM model"
        )
    if model.stem_ffn == "hash-moe":
        raise InputError(
            f"{bundle.path}: the rows of this model are {model.n_experts} experts, which are "
            "matrices, not directions; give the bundle of a model with a row for each token"
        )
    if model.ngram_order:
        raise InputError(
            f"{bundle.path}: the rows of this model belong to n-grams; give the bundle of a model with "
            "a row for each token"
        )
    if wanted is None:
        return list(model.stem_layers)
    if not wanted:
        raise InputError("layers is empty; name some STEM layers, or leave it out for all")
    if unknown := sorted(set(wanted) - set(model.stem_layers)):
        known = ", ".join(map(str, model.stem_layers))
        raise InputError(
            f"layer {unknown[0]} has no table in {bundle.path}; choose from its STEM layers: {known}"
        )
    return sorted(set(wanted))
