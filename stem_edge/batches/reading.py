"""The rows of a file, as they are read: lines of JSON, or a table of parquet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stem_edge.batches.keys import Keys
from stem_edge.batches.rows import InputRow, named
from stem_edge.errors import InputError
from stem_edge.files.strict_json import BOM
from stem_edge.shown import shown

MAX_ROW_NBYTES = 16 << 20  # as requests of the server
PIECE = 1 << 20  # bytes that are looked at at once for ends of lines
PARQUET = ".parquet"
AT_ONCE = 256  # rows of a table


def is_parquet(path: Path) -> bool:
    """Return whether a path names a parquet table."""
    return path.suffix.lower() == PARQUET


def count_rows(path: Path | None, column: str | None = None) -> int | None:
    """Return the number of rows, empty lines among them; None of stdin and pipes. Raises InputError."""
    if path is None or path.is_fifo() or path.is_char_device():  # which can be read only once
        return None
    if is_parquet(path):
        with _table(path, column) as table:
            return int(table.metadata.num_rows)
    with _opened(path) as file:
        count, last = 0, b"\n"
        while piece := file.read(PIECE):
            count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last != b"\n")


def read_rows(path: Path | None, column: str | None = None) -> Iterator[InputRow]:
    """Yield the rows of a file as they are read, those that are wrong among them.

    path: a file of JSON lines, or of parquet with the column of prompts; None: lines of stdin. Empty
    lines are no rows. An id that an earlier row has is wrong. Raises InputError, also for no rows.
    """
    table = path if path is not None and is_parquet(path) else None
    found = _lines(path) if table is None else _table_rows(table, column)
    seen, row = Keys(), None
    for row in found:
        if seen.add(row.key):
            yield row
        else:
            wrong = f"an earlier row has the id {shown(row.id)}; give each row its own"
            yield replace(row, id=None, wrong=wrong)
    if row is None:
        raise InputError(f"{path or 'stdin'}: has no rows; give one JSON object a line")


def _lines(path: Path | None) -> Iterator[InputRow]:
    with nullcontext(sys.stdin.buffer) if path is None else _opened(path) as file:
        number = 0
        while line := file.readline(MAX_ROW_NBYTES + 1):
            number += 1
            if len(line) > MAX_ROW_NBYTES and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := file.readline(PIECE)):
                    pass
                yield InputRow(
                    None, number, b"", f"longer than {MAX_ROW_NBYTES:,} bytes; shorten it"
                )
                continue
            line = line.removeprefix(BOM).strip() if number == 1 else line.strip()
            if line:
                yield named(line, number)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the rows ({error.strerror}); give another file"
        ) from None


def _table_rows(path: Path, column: str | None) -> Iterator[InputRow]:
    """Yield the rows of a table: the prompt or the messages in a column, and the id if there is one.

    column: of texts, of lists of token ids, or of lists of messages. Raises InputError.
    """
    with _table(path, column) as file:
        columns, number = [column, *({"id"} & set(file.schema_arrow.names) - {column})], 0
        for piece in file.iter_batches(batch_size=AT_ONCE, columns=columns):
            for found in piece.to_pylist():
                number += 1
                yield _row(found[column], found.get("id") if column != "id" else None, number)


def _row(given: Any, id: Any, number: int) -> InputRow:
    is_messages = isinstance(given, list) and given and isinstance(given[0], dict)
    field = "messages" if is_messages else "prompt"
    if given is None:
        return InputRow(None, number, b"", "the column has no value in this row")
    if is_messages:  # a column of structs has all fields in each
        given = [{k: v for k, v in message.items() if v is not None} for message in given]
    try:
        return named(msgspec.json.encode({"id": id, field: given}), number)
    except (TypeError, ValueError) as error:
        return InputRow(None, number, b"", f"no prompt: {error}")


def _table(path: Path, column: str | None) -> Any:
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
