"""Results of a batch, and the file that they are appended to."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.batches.rows import key_of


@dataclass(frozen=True)
class Result:
    """The answer to a row, or why there is none.

    id, line: those of the row. data: its line in the output: JSON, without the end of the line.
    failed: whether it is an error. tokens: of the answer.
    """

    id: str | int | None
    line: int
    data: bytes
    failed: bool = False
    tokens: int = 0

    @property
    def key(self) -> bytes:
        """What makes it the result of a row."""
        return key_of(self.id, self.line)
