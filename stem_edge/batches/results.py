"""Results of a batch, as lines of JSON."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stem_edge.answers.refusals import openai_error, status_of
from stem_edge.batches.rows import Row, key_of
from stem_edge.errors import StemEdgeError

OK = 200


@dataclass(frozen=True)
class Result:
    """The answer to a row, or the reason why it has none.

    id, line: those of the row. data: its line in the output: JSON, without the end of the line.
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
        """Key of the row whose result it is."""
        return key_of(self.id, self.line)


def plain(row: Row, fields: Mapping[str, Any], tokens: int) -> Result:
    """Return the answer to a plain row."""
    return Result(row.id, row.line, msgspec.json.encode({"id": row.id, **fields}), tokens=tokens)


def responded(row: Row, body: Mapping[str, Any], tokens: int = 0, status: int = OK) -> Result:
    """Return the answer to a row of OpenAI's form, or an error that the server would answer."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    id = f"batch_req_{secrets.token_hex(12)}"
    data = {"id": id, "custom_id": row.id, "response": response, "error": None}
    return Result(row.id, row.line, msgspec.json.encode(data), status != OK, tokens)


def failed(row: Row, error: StemEdgeError, *, openai: bool = False) -> Result:
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
