"""Rows of a batch, and their results as lines of JSON."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stem_edge.answers.refusals import openai_error, status_of
from stem_edge.errors import StemEdgeError
from stem_edge.files.strict_json import one_line
from stem_edge.shown import shown

MAX_ID_CHARS = 1024


@dataclass(frozen=True)
class InputRow:
    """A row of the input.

    id: of its result: its custom_id, its id, or else its number; None if its id cannot be used, and
    only its number identifies it. line: its number in the input, from 1. data: its JSON. wrong: why
    it cannot be answered, as far as reading shows.
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
    """Return the key of a row: its id, or its line without one."""
    return b"line %d" % line if id is None else msgspec.json.encode(id)


class _Ids(msgspec.Struct):
    """The fields of a row that can name it."""

    custom_id: Any = msgspec.UNSET
    id: Any = None


def named(data: bytes, line: int) -> InputRow:
    """Return the row of a JSON object, with its id."""
    try:
        ids = msgspec.json.decode(data, type=_Ids)
    except (ValueError, RecursionError) as error:  # of msgspec
        return InputRow(None, line, b"", f"not a JSON object: {one_line(error)}")
    if ids.custom_id is not msgspec.UNSET:
        if isinstance(ids.custom_id, str) and 0 < len(ids.custom_id) <= MAX_ID_CHARS:
            return InputRow(ids.custom_id, line, data)
        wanted = f"a text of 1 to {MAX_ID_CHARS} characters"
        return InputRow(None, line, b"", f"custom_id is {shown(ids.custom_id)}; expected {wanted}")
    id = line if ids.id is None else ids.id
    if _is_text(id) or _is_number(id):
        return InputRow(id, line, data)
    wanted = f"a text of 1 to {MAX_ID_CHARS} characters, or a whole number of 64 bits"
    return InputRow(None, line, b"", f"id is {shown(id)}; expected {wanted}")


def _is_text(id: object) -> bool:
    return isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARS


def _is_number(id: object) -> bool:
    return isinstance(id, int) and not isinstance(id, bool) and -(2**63) <= id < 2**63


OK = 200


@dataclass(frozen=True)
class Result:
    """The answer to a row, or the reason why there is no answer.

    id, line: of the row. data: its line in the output: JSON, without the end of the line.
    failed: whether it is an error, and why. tokens: of the answer.
    """

    id: str | int | None
    line: int
    data: bytes
    failed: bool = False
    tokens: int = 0
    why: str = ""

    @property
    def key(self) -> bytes:
        """Key of its row."""
        return key_of(self.id, self.line)


def plain(row: InputRow, fields: Mapping[str, Any], tokens: int) -> Result:
    """Return the answer to a plain row."""
    return Result(row.id, row.line, msgspec.json.encode({"id": row.id, **fields}), tokens=tokens)


def responded(row: InputRow, body: Mapping[str, Any], tokens: int = 0, status: int = OK) -> Result:
    """Return the answer to a row of OpenAI's form, or an error that the server would answer."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    id = f"batch_req_{secrets.token_hex(12)}"
    data = {"id": id, "custom_id": row.id, "response": response, "error": None}
    return Result(row.id, row.line, msgspec.json.encode(data), status != OK, tokens)


def failed(row: InputRow, error: StemEdgeError, *, openai: bool = False) -> Result:
    """Return why there is no answer to a row. openai: whether it is of OpenAI's form."""
    body = openai_error(error)
    if openai:
        return replace(responded(row, body, status=status_of(error)), why=str(error))
    data = msgspec.json.encode({"id": row.id, "line": row.line, **body})
    return Result(row.id, row.line, data, failed=True, why=str(error))


class _Line(msgspec.Struct):
    """Fields of a line of results that tell of its row."""

    id: str | int | None
    custom_id: str | None = None
    line: int = 0
    error: Any = None
    response: dict[str, Any] | None = None


def known(data: bytes) -> tuple[bytes, bool]:
    """Return the key of a result by its line, and whether it is an error. Raises ValueError."""
    found = msgspec.json.decode(data, type=_Line)
    response = found.response or {"status_code": OK}
    is_error = found.error is not None or response.get("status_code") != OK
    id = found.id if found.custom_id is None else found.custom_id
    return key_of(id, found.line), is_error
