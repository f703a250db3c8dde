"""Plans the table store of a new bundle: its format, and the position of each record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.numerics.block_search import least_error_scales
from stem_edge.numerics.quantize import I32, I64
from stem_edge.tables.codecs import RowType, form_of
from stem_edge.tables.packing import Scaling, make_layout, range_scales
from stem_edge.tables.rows import RecordLayout, ScaleType
from stem_edge.tables.store import TableFormat

ExportRows = Literal["fp32", "fp16", "int8", "int4", "mixed"]
EXPORT_ROWS: tuple[ExportRows, ...] = get_args(ExportRows)
# Share of the records that mixed tables store with 8 bits, those of the most frequent tokens. For the
# same bytes, smaller groups of values would gain less exactness (docs/results.md).
FREQUENT = 0.05
# Half the bytes of float32 scales; no loss of exactness was measured.
MIXED_SCALES: ScaleType = "fp16"


class RowStorage(NamedTuple):
    """How table rows are stored: type of rows, values per scale, and type of scales."""

    kind: ExportRows | RowType
    group_size: int  # values that share a scale
    scales: ScaleType = "fp32"


@dataclass(frozen=True)
class TablePlan:
    """Plan of a bundle's table store: its format, and the order of its records."""

    format: TableFormat
    # Record -> row in the checkpoint's tables, ascending in each array; None: record i is row i.
    order: I64 | None = None
    index: I32 | None = None  # token -> record; None: token i has record i


def plan_tables(source: Checkpoint, rows: RowStorage, counts: I64) -> TablePlan | None:
    """Plan the table store for a checkpoint. Returns None for a dense model (one without tables).

    counts: uses of each token [V] in a text. Raises ExportError for row types that do not fit the model.
    """
    config, (tables, group_size, scales) = source.config, rows
    if not config.stem_layers and tables == "mixed":
        raise ExportError(f"{source.path}: a dense model has no tables; leave out --rows mixed")
    if not config.stem_layers:
        return None
    if config.ngram_order and tables == "mixed":
        raise ExportError(
            f"{source.path}: no text says how often rows of n-grams are used; choose rows fp32, "
            "fp16, int8 or int4"
        )
    row_type: RowType = "int8" if tables == "mixed" else tables
    if config.stem_ffn == "hash-moe" and form_of(row_type) == "fp16":
        raise ExportError(
            f"{source.path}: experts cannot be {tables}, because no operator takes them; choose rows "
            "fp32, int8 or int4"
        )
    shape = (config.records, config.row_layers, config.row_parts())
    scales = MIXED_SCALES if tables == "mixed" else scales
    try:
        layout = make_layout(*shape, row_type, group_size, scales, config.mixed_rows)
        if tables == "mixed":
            return _mixed(source, layout, counts)
        indexed = source.index is not None
        format = TableFormat(tokens=config.table_ids, stored=layout, indexed=indexed)
        return TablePlan(format, index=source.index)
    except ValueError as error:
        raise ExportError(f"{source.path}: cannot store its tables as {tables}: {error}") from error


def _mixed(source: Checkpoint, layout: RecordLayout, counts: I64) -> TablePlan:
    if not counts.any():
        raise ExportError(
            "mixed tables keep the frequent tokens at 8 bits, which takes a text to count tokens in; "
            "give one like those that the model will see, with --calibration FILE"
        )
    kept = min(layout.records - 1, max(1, round(FREQUENT * layout.records)))
    index = np.arange(layout.records) if source.index is None else source.index
    uses = np.bincount(index, weights=counts, minlength=layout.records)
    best = np.argsort(-uses, kind="stable")
    # Both parts are sorted, so that the checkpoint is read from front to back.
    order = np.concatenate([np.sort(best[:kept]), np.sort(best[kept:])])
    record_of = np.empty(layout.records, np.int32)
    record_of[order] = np.arange(layout.records, dtype=np.int32)
    format = TableFormat(
        tokens=source.config.vocab_size,
        stored=layout,
        rare_tables=msgspec.structs.replace(layout, row_type="int4", records=layout.records - kept),
        indexed=True,
    )
    index = record_of if source.index is None else record_of[source.index]
    return TablePlan(format, order, index)


def scaling_of(layout: RecordLayout) -> Scaling:
    """Return the function that computes scales: from the values' range, or by search for 4 bits."""
    return least_error_scales if layout.bits < 8 else range_scales
