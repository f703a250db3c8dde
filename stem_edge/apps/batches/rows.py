"""Rows of a batch as lines of JSON, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec

from stem_edge.errors import InputError
from stem_edge.files.strict_json import BOM, one_line
from stem_edge.shown import shown

MAX_ROW_NBYTES = 16 << 20
PIECE = 1 << 20  # bytes read at once while lines are counted or dropped
MAX_ID_CHARS = 1024

Id: TypeAlias = str | int
Key: TypeAlias = Id | tuple[int]  # what tells rows apart: the id, or the line of a row without one


@dataclass(frozen=True)
class Row:
    """A row of the input.

    id: its "id", else its line; None if its "id" cannot be used. line: from 1. fields: its JSON
    object without "id". wrong: why it cannot be answered, as far as reading shows.
    """

    id: Id | None
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    wrong: str | None = None

    @property
    def key(self) -> Key:
        """Key of the row and of its result."""
        return (self.line,) if self.id is None else self.id


@dataclass(frozen=True)
class Result:
    """The answer to a row, or the error that it ended with.

    data: its line in the output, JSON without the end of the line. tokens: generated for it. error:
    message, None for an answer.
    """

    key: Key
    line: int
    data: bytes
    tokens: int = 0
    error: str | None = None


def answered(row: Row, fields: Mapping[str, Any], tokens: int) -> Result:
    """Return the answer to a row."""
    data = msgspec.json.encode({"id": row.id, **fields})
    return Result(row.key, row.line, data, tokens)


def failed(row: Row, error: Mapping[str, Any]) -> Result:
    """Return the error of a row. error: {"error": {"message": ...}}."""
    data = msgspec.json.encode({"id": row.id, "line": row.line, **error})
    return Result(row.key, row.line, data, error=error["error"]["message"])


_Id = (
    Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
    | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
)


class _Line(msgspec.Struct):
    """What a line of results says of its row."""

    id: Id | None
    line: int = 0
    error: Any = None


def parse_result(data: bytes) -> tuple[Key, bool]:
    """Return the key of a line of results, and whether it is an error. Raises ValueError."""
    found = msgspec.json.decode(data, type=_Line)
    return (found.line,) if found.id is None else found.id, found.error is not None


def count_rows(path: Path) -> int | None:
    """Count the lines of a file; None for a pipe. Raises InputError."""
    if path.is_fifo() or path.is_char_device():  # which can be read only once
        return None
    with _open(path) as file:
        count, last = 0, b"\n"
        while piece := file.read(PIECE):
            count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last != b"\n")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file as they are read.

    Rows that cannot be answered say why; an id that an earlier row has is such a reason. Blank lines
    are skipped. Raises InputError if the file cannot be read or has no rows.
    """
    seen = set[Key]()
    with _open(path) as file:
        for number, line in _lines(file):
            row = _parse(line, number)
            if row.key in seen:
                wrong = f"an earlier row has the id {shown(row.id)}; give each row its own"
                row = Row(None, number, wrong=wrong)
            seen.add(row.key)
            yield row
    if not seen:
        raise InputError(f"{path}: has no rows; give one JSON object a line")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not blank; of long ones only the beginning."""
    number = 0
    while line := file.readline(MAX_ROW_NBYTES + 1):
        number += 1
        rest = line
        while len(line) > MAX_ROW_NBYTES and rest and not rest.endswith(b"\n"):
            rest = file.readline(PIECE)
        line = line.removeprefix(BOM).strip() if number == 1 else line.strip()
        if line:
            yield number, line


def _parse(line: bytes, number: int) -> Row:
    if len(line) > MAX_ROW_NBYTES:
        return Row(None, number, wrong=f"longer than {MAX_ROW_NBYTES:,} bytes; shorten it")
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        return Row(None, number, wrong=f"not a JSON object: {one_line(error)}")
    id = fields.pop("id", None)
    if id is None:
        return Row(number, number, fields)
    try:
        msgspec.convert(id, _Id)
    except msgspec.ValidationError:
        wanted = f"a text of 1 to {MAX_ID_CHARS} characters, or a whole number of 64 bits"
        return Row(None, number, wrong=f"id is {shown(id)}; expected {wanted}")
    return Row(id, number, fields)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the rows ({error.strerror}); give another file"
        ) from None
