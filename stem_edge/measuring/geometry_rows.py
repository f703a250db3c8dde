"""The rows of a table store in one pass over it: their norms, and the nearest ones of some tokens.

Records are read in batches of a few MB, and the maps of the store are opened anew now and then:
neither memory of ours nor mapped pages grow with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stem_edge.errors import BundleError
from stem_edge.measuring.geometry_spread import unit
from stem_edge.progress import Progress
from stem_edge.quantize import F32, I64, U8
from stem_edge.rows import RecordLayout
from stem_edge.tables import Tables, open_tables

BATCH_NBYTES = 4 << 20
# Batches read through the same maps: their pages stay mapped until these are closed.
MAPPED_NBYTES = 256 << 20
SCATTERED = 128  # rows that are read through the same maps, where they are not in order
# Squares summed in float32 outside of this may have lost all their digits.
SAFE_SQUARES = (1e-20, 1e36)


@dataclass(frozen=True)
class Best:
    """The nearest rows of some queries, the nearest first; where there are none, id -1."""

    cosines: F32  # [queries, neighbours]
    token_ids: I64  # the same shape


def batch_records(layout: RecordLayout) -> int:
    """Records of a batch: it takes BATCH_NBYTES, as they are stored and as rows of one layer."""
    return max(1, BATCH_NBYTES // max(layout.record_nbytes, 4 * layout.row_width))


def batches(root: Path, tokens: int, progress: Progress) -> Iterator[tuple[I64, Tables, U8]]:
    """All tokens in order: ids [n], the open tables, records [n, record_nbytes]."""
    start = 0
    while start < tokens:
        with open_tables(root) as tables:
            size, nbytes = batch_records(tables.layout), tables.layout.record_nbytes
            end = min(tokens, start + max(size, MAPPED_NBYTES // nbytes))
            for at in range(start, end, size):
                ids = np.arange(at, min(at + size, end))
                yield ids, tables, tables.records(ids)
                progress.advance(len(ids) * nbytes)
            start = end


def read_rows(root: Path, ids: I64, layer: int) -> F32:
    """Rows [n, width] of ids: SCATTERED at a time, around each of which much may be mapped."""
    pieces = []
    for at in range(0, len(ids), SCATTERED):
        with open_tables(root) as tables:
            pieces.append(tables[ids[at : at + SCATTERED], layer])
    return np.concatenate(pieces)


def stream(
    root: Path,
    tokens: int,
    layers: Sequence[int],
    queries: Sequence[int],
    neighbours: int,
    show: bool | None,
) -> tuple[dict[int, F32], dict[int, Best]]:
    """Layer -> norms [tokens] of its rows; layer -> the rows nearest to those of the queries.

    Raises BundleError for values that are no numbers.
    """
    directions: dict[int, F32] = {}
    with open_tables(root) as tables:
        total = tokens * tables.layout.record_nbytes
        for layer in layers:
            directions[layer] = unit(tables[np.array(queries, np.int64), layer])
    norms = {layer: np.empty(tokens, np.float32) for layer in layers}
    best = {layer: _nothing(len(queries), neighbours) for layer in layers}
    with Progress(total, "reading rows", show) as progress:
        for ids, tables, records in batches(root, tokens, progress):
            for layer in layers:
                rows = tables.layout.unpack(records, tables.layers.index(layer))
                lengths = norms[layer][ids] = row_norms(rows, layer, int(ids[0]))
                if len(queries):
                    cosines = _cosines(directions[layer], rows, lengths)
                    cosines[np.asarray(queries)[:, None] == ids] = -np.inf
                    best[layer] = _merge(best[layer], cosines, ids)
    return norms, best


def row_norms(rows: F32, layer: int, first: int) -> F32:
    """Lengths [n] of rows [n, width], those of tokens from `first` on. Raises BundleError."""
    squares = np.einsum("ij,ij->i", rows, rows)
    doubtful = ~((squares > SAFE_SQUARES[0]) & (squares < SAFE_SQUARES[1]))
    lengths = np.sqrt(squares)
    if doubtful.any():
        exact = rows[doubtful].astype(np.float64)
        lengths[doubtful] = np.sqrt((exact * exact).sum(axis=1))
    if not np.isfinite(lengths).all():
        token = first + int(np.flatnonzero(~np.isfinite(lengths))[0])
        raise BundleError(
            f"row of token {token} in layer {layer} has values that are no finite numbers; check "
            "the bundle with stem-edge verify, or export it again"
        )
    return np.asarray(lengths, np.float32)


def _cosines(directions: F32, rows: F32, lengths: F32) -> F32:
    """[queries, n]; -inf where a row or a query is zero."""
    products: F32 = directions @ rows.T
    products /= np.where(lengths > 0, lengths, np.float32(1))
    products[:, lengths == 0] = -np.inf
    products[~directions.any(axis=1)] = -np.inf
    return products


def _nothing(queries: int, neighbours: int) -> Best:
    shape = (queries, neighbours)
    return Best(np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64))


def _merge(best: Best, cosines: F32, ids: I64) -> Best:
    """The best of both; of equal ones the lower ids, which came first."""
    count = best.cosines.shape[1]
    both = np.concatenate([best.cosines, cosines], axis=1)
    owners = np.concatenate([best.token_ids, np.broadcast_to(ids, cosines.shape)], axis=1)
    order = np.argsort(-both, axis=1, kind="stable")[:, :count]
    found = np.take_along_axis(both, order, axis=1)
    names = np.take_along_axis(owners, order, axis=1)
    return Best(found, np.where(np.isfinite(found), names, -1))
