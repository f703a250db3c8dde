"""Rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from stem_edge.files.strict_json import one_line
from stem_edge.shown import shown

MAX_ID_CHARS = 1024


@dataclass(frozen=True)
class Row:
    """A row of the input.

    id: of its result: its custom_id, its id, or else its number; None if it has none that can be used,
    so that only its number tells it. line: its number in the input, from 1. data: its JSON. wrong: why
    it cannot be answered, as far as reading tells.
    """

    id: str | int | None
    line: int
    data: bytes
    wrong: str | None = None

    @property
    def key(self) -> bytes:
        """Key of the row, which its result has, too."""
        return key_of(self.id, self.line)


def key_of(id: str | int | None, line: int) -> bytes:
    """Return the key of a row: its id, or its line if it has none."""
    return b"line %d" % line if id is None else msgspec.json.encode(id)


class _Ids(msgspec.Struct):
    """The fields of a row that can name it."""

    custom_id: Any = msgspec.UNSET
    id: Any = None


def named(data: bytes, line: int) -> Row:
    """Return the row of a JSON object, with its id."""
    try:
        ids = msgspec.json.decode(data, type=_Ids)
    except (ValueError, RecursionError) as error:  # of msgspec
        return Row(None, line, b"", f"not a JSON object: {one_line(error)}")
    if ids.custom_id is not msgspec.UNSET:
        if isinstance(ids.custom_id, str) and 0 < len(ids.custom_id) <= MAX_ID_CHARS:
            return Row(ids.custom_id, line, data)
        wanted = f"a text of 1 to {MAX_ID_CHARS} characters"
        return Row(None, line, b"", f"custom_id is {shown(ids.custom_id)}; expected {wanted}")
    id = line if ids.id is None else ids.id
    if _is_text(id) or _is_number(id):
        return Row(id, line, data)
    wanted = f"a text of 1 to {MAX_ID_CHARS} characters, or a whole number of 64 bits"
    return Row(None, line, b"", f"id is {shown(id)}; expected {wanted}")


def _is_text(id: object) -> bool:
    return isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARS


def _is_number(id: object) -> bool:
    return isinstance(id, int) and not isinstance(id, bool) and -(2**63) <= id < 2**63
