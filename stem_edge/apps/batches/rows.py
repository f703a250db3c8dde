"""Rows of a batch: the JSON lines of the input file."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from stem_edge.apps.answers.openai.options import MOST_NBYTES
from stem_edge.errors import InputError
from stem_edge.shown import one_line, shown

MAX_ID_CHARS = 1024

Id: TypeAlias = str | int
Key: TypeAlias = Id | tuple[int]  # identifies a row: its id, or (line,) if its id is invalid
Result: TypeAlias = Mapping[str, Any]  # JSON object of a row's answer or error


def key_of(id: Id | None, line: int) -> Key:
    """Return the key by which a row and its result are matched: `id`, or (line,) if id is None."""
    return (line,) if id is None else id


@dataclass(frozen=True)
class Row:
    """One row of the input file.

    id: the "id" of the JSON object; without "id", the line number; None if "id" is invalid. line:
    counted from 1. fields: the JSON object without "id". wrong: why the row is invalid, or None.
    """

    id: Id | None
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    wrong: str | None = None


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file as they are read.

    Invalid rows, such as rows with a repeated id, have the reason in `wrong`. Blank lines are
    skipped. Raises InputError if the file cannot be read or has no rows.
    """
    seen = set[Key]()
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the rows ({error.strerror}); give another file"
        ) from None
    with file:
        for number, data in enumerate(lines_of(file), 1):
            line = data.removeprefix(BOM_UTF8) if number == 1 else data
            if line.strip():
                row = _parse(line, number)
                if (key := key_of(row.id, number)) in seen:
                    wrong = f"an earlier row has the id {shown(row.id)}; give each row its own"
                    row = Row(None, number, wrong=wrong)
                seen.add(key)
                yield row
    if not seen:
        raise InputError(f"{path}: has no rows; give one JSON object a line")


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of a line that is too long for a row, only the beginning."""
    while line := file.readline(MOST_NBYTES + 1):
        yield line
        while len(line) > MOST_NBYTES and not line.endswith(b"\n"):
            line = file.readline(MOST_NBYTES + 1)


def _parse(line: bytes, number: int) -> Row:
    if len(line) - line.endswith(b"\n") > MOST_NBYTES:
        return Row(None, number, wrong=f"the line is longer than {MOST_NBYTES:,} bytes")
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        return Row(None, number, wrong=f"not a JSON object: {one_line(error)}")
    id = fields.pop("id", None)
    if id is None:
        return Row(number, number, fields)
    named = isinstance(id, str) and 1 <= len(id) <= MAX_ID_CHARS
    if named or (type(id) is int and -(2**63) <= id < 2**63):
        return Row(id, number, fields)
    wanted = f"a text of 1 to {MAX_ID_CHARS} characters, or a whole number of 64 bits"
    return Row(None, number, wrong=f"id is {shown(id)}; expected {wanted}")
