"""Text for a terminal: aligned tables, wrapped paragraphs, and escaped control characters."""

from __future__ import annotations

import re
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence

WIDTH = 80  # columns of a small terminal


def table(rows: Sequence[Sequence[str]], align: str = "lr") -> list[str]:
    """Return rows as lines with aligned columns. A column is as wide as its widest cell.

    align: "l" or "r" for each column; the last letter is for all further columns. Rows may differ in
    length. A table wider than a small terminal gets one space between its columns.
    """
    widths = [
        max(columns(row[at]) for row in rows if at < len(row))
        for at in range(max(map(len, rows), default=0))
    ]
    space = " " * (2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1)
    sides = align + align[-1] * len(widths)
    return [space.join(map(fill, row, widths, sides)).rstrip() for row in rows]


def fill(text: str, width: int, side: str = "l") -> str:
    """Pad text to `width` columns, on the right, or on the left if side is "r"."""
    spaces = " " * (width - columns(text))
    return spaces + text if side == "r" else text + spaces


def columns(text: str) -> int:
    """Return how many terminal columns a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def cut(text: str, width: int, mark: str = "") -> str:
    """Shorten text to at most `width` columns. Shortened text ends with the mark."""
    if columns(text) <= width:
        return text
    while columns(text) > width - len(mark):
        text = text[:-1]
    return text + mark


def wrapped(text: str, inside: str = "") -> list[str]:
    """Wrap a paragraph to the width of the terminal. inside: indent of all lines but the first."""
    width = min(WIDTH, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        text, width, subsequent_indent=inside, break_on_hyphens=False, break_long_words=False
    )


def shown_lines(text: str) -> str:
    """Escape control characters except newlines and tabs."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


def seconds(value: float) -> str:
    """Format a time for people, in s or ms, with 3 digits."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def format_rate(value: float) -> str:
    """Format a rate for people: 3 digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
