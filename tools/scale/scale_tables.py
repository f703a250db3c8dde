"""Tables of figures, printed as Markdown or JSON."""

from __future__ import annotations

from typing import TypeAlias

from stem_edge.units import format_rate

Cell: TypeAlias = str | int | float


class Table:
    """Rows of cells, with a heading of its own for each column, which says the unit."""

    def __init__(self, *headings: str) -> None:
        self.headings = headings
        self.rows: list[tuple[Cell, ...]] = []

    def add(self, *cells: Cell) -> None:
        """Add a row."""
        self.rows.append(cells)

    def markdown(self) -> str:
        """Return the table as Markdown; numbers have 3 digits, or all before the point."""
        rules = ["---" if isinstance(cell, str) else "---:" for cell in self.rows[0]]
        lines = [list(self.headings), rules, *([_text(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def records(self) -> list[dict[str, Cell]]:
        """Return a dictionary for each row, by heading, with exact figures."""
        return [dict(zip(self.headings, row, strict=True)) for row in self.rows]


def _text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else format_rate(cell)
