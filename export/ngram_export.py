"""Exports only a model's n-gram tables, for an inference server that runs the backbone itself.

A table consists of pages with one or more rows each. They are written piece by piece, so an export of
100 GB of rows needs only some MB of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np

from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.checkpoints.ngram_tables import StoredRows, is_table, open_tables
from stem_edge.export.job.files import Output
from stem_edge.export.job.publish import check_apart, check_free, publish
from stem_edge.export.job.table_plan import scaling_of
from stem_edge.export.tables import make_grid, write_array, write_index, write_json
from stem_edge.export.token_classes import token_classes
from stem_edge.numerics.quantize import I32, U8, fitting_block
from stem_edge.progress import Progress
from stem_edge.system.memory import check_threads, usable_cpus
from stem_edge.tables.ngrams.rows import NgramTable
from stem_edge.tables.ngrams.store import ATTRIBUTE, CLASSES, NgramFormat, is_ngrams
from stem_edge.tables.packing import pack_records
from stem_edge.tables.zarr_json import group_document

RowsStored = Literal["keep", "int8", "int4"]
ROWS_STORED: tuple[RowsStored, ...] = get_args(RowsStored)
# Size of a shard. All shards are open at once, and a process may open only some hundreds of files.
SHARD_NBYTES = 512 << 20
PIECE_NBYTES = 8 << 20  # pages that a thread packs at a time
BLOCK = 32  # values of a row that share a scale


def export_rows(
    checkpoint: str | Path,
    out: str | Path,
    *,
    rows: RowsStored = "keep",
    force: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Export a model's n-gram tables to the folder `out`, which open_rows reads. Returns `out`.

    checkpoint: Hugging Face folder, or hf:org/name; only the files with the tables are fetched.
    rows: type of the stored rows: "keep" for the checkpoint's own type, "int8" or "int4".
    force: replace `out` if it holds n-gram tables. threads: their number; default: one for each CPU.
    progress: show a progress bar on stderr; default: if stderr is a terminal.

    Reads only config.json, the index and the files with the tables, and tokenizer.json for DeepSeek's
    models. Raises CheckpointError, ExportError.
    """
    check_threads(threads, ExportError)
    folder, out = checkpoint_folder(checkpoint, progress, is_table), Path(out)
    check_apart(out, [folder])
    found = open_tables(folder)
    format = NgramFormat(tables=tuple(_stored(one.table, rows) for one in found))
    class_of = None
    if format.classes is not None:
        class_of = token_classes(folder / "tokenizer.json", *format.classes)
    with publish(out, "a folder of tables", is_ngrams, force=force) as work:
        check_free(out, format.nbytes)
        with Progress(format.nbytes, "exporting tables", progress) as bar:
            _write(Output(work, bar), found, format, class_of, threads or usable_cpus())
    return out


def _stored(table: NgramTable, rows: RowsStored) -> NgramTable:
    """Return `table` with its row type changed to `rows` ("keep": as it is). Raises ExportError."""
    if rows not in ROWS_STORED:
        raise ExportError(f"rows of n-grams as {rows!r}; expected {', '.join(ROWS_STORED)}")
    if rows == "keep":
        return table
    block = fitting_block(table.width, BLOCK)
    if not block:
        raise ExportError(f"rows of {table.width} values have no blocks for {rows}; keep them")
    return msgspec.structs.replace(table, stored=rows, block=block, scale=1.0)


def _write(
    out: Output,
    rows: Sequence[StoredRows],
    format: NgramFormat,
    class_of: I32 | None,
    threads: int,
) -> None:
    """Write all tables. class_of: token id -> token class; None if n-grams consist of token ids."""
    write_json(out, Path(), group_document(ATTRIBUTE, format))
    if class_of is not None:
        write_index(out, Path(CLASSES), class_of)
    for source, table in zip(rows, format.tables, strict=True):
        grid = make_grid(Path(table.name), table.format.stored, SHARD_NBYTES)
        step = max(1, PIECE_NBYTES // table.page_nbytes)
        write_array(out, grid, step, threads, partial(_pages, out, source, table))


def _pages(out: Output, source: StoredRows, table: NgramTable, start: int, stop: int) -> U8:
    """Return pages start..stop as bytes [n, page_nbytes]; zeros fill the end of each page after its rows."""
    first = start * table.rows_per_page
    last = min(stop * table.rows_per_page, table.hash.rows)
    rows = source.read(first, last)
    if table != source.table:
        values = source.table.values(rows)
        rows = pack_records(table.codes, [values], scaling_of(table.codes))
    filled = np.zeros((stop - start) * table.rows_per_page * table.row_nbytes, np.uint8)
    filled[: rows.size] = rows.reshape(-1)
    pages = np.zeros((stop - start, table.page_nbytes), np.uint8)
    pages[:, : table.rows_per_page * table.row_nbytes] = filled.reshape(stop - start, -1)
    out.bar.advance(pages.nbytes)
    return pages
