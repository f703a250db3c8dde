"""Rows of a parquet file, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.batches.rows import Row, named
from stem_edge.errors import InputError
from stem_edge.shown import shown

AT_ONCE = 256  # rows


def count_rows(path: Path, column: str | None) -> int:
    """Return the number of rows. Raises InputError, also for a column that it does not have."""
    with _opened(path, column) as file:
        return int(file.metadata.num_rows)


def read_rows(path: Path, column: str | None) -> Iterator[Row]:
    """Yield the rows: of each the prompt or the messages in a column, and its id if there is one.

    column: of texts, of lists of token ids, or of lists of messages. Raises InputError.
    """
    with _opened(path, column) as file:
        columns, number = [column, *({"id"} & set(file.schema_arrow.names) - {column})], 0
        for piece in file.iter_batches(batch_size=AT_ONCE, columns=columns):
            for found in piece.to_pylist():
                number += 1
                yield _row(found[column], found.get("id") if column != "id" else None, number)


def _row(given: Any, id: Any, number: int) -> Row:
    is_messages = isinstance(given, list) and given and isinstance(given[0], dict)
    field = "messages" if is_messages else "prompt"
    if given is None:
        return Row(None, number, b"", "the column has no value in this row")
    if is_messages:  # a column of structs has all fields in each
        given = [{k: v for k, v in message.items() if v is not None} for message in given]
    try:
        return named(msgspec.json.encode({"id": id, field: given}), number)
    except (TypeError, ValueError) as error:
        return Row(None, number, b"", f"no prompt: {error}")


def _opened(path: Path, column: str | None) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(
            f"{path}: parquet needs the package pyarrow; install it with: "
            "pip install 'stem-edge[parquet]'"
        ) from None
    try:
        file = ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot read the rows ({error}); give another file") from None
    if column not in (names := file.schema_arrow.names):
        file.close()
        given = "no column is given" if column is None else f"there is no column {shown(column)}"
        raise InputError(f"{path}: {given}; take one of {', '.join(names)} with --column")
    return file
