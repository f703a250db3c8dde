"""Rows of a batch, as they are read from a file."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Row:
    """A row of the input.

    id: of its result; None if it has none that can be used, so that its line names it. line: its
    number in the input, from 1. data: its JSON. wrong: why it cannot be answered, as far as reading
    tells.
    """

    id: str | int | None
    line: int
    data: bytes
    wrong: str | None = None

    @property
    def key(self) -> bytes:
        """What makes it the same row as that of a result."""
        return key_of(self.id, self.line)


def key_of(id: str | int | None, line: int) -> bytes:
    """Return the key of a row: its id, or its line if it has none."""
    return b"line %d" % line if id is None else msgspec.json.encode(id)
