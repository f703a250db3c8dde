"""Text for a terminal: tables with aligned columns, paragraphs, and what would break either."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence

WIDTH = 80  # columns of a small terminal


def table(rows: Sequence[Sequence[str]], align: str = "lr", gap: int = 2) -> list[str]:
    """Lines of rows whose columns line up, each as wide as its widest cell.

    align: "l" or "r" for each column; the last letter counts for all that follow. Rows may be
    shorter than others. A table wider than a small terminal has one space between its columns.
    """
    widths = [
        max(columns(row[at]) for row in rows if at < len(row))
        for at in range(max(map(len, rows), default=0))
    ]
    space = " " * (gap if sum(widths) + gap * (len(widths) - 1) <= WIDTH else 1)
    sides = align + align[-1] * len(widths)
    return [space.join(map(fill, row, widths, sides)).rstrip() for row in rows]


def fill(text: str, width: int, side: str = "l") -> str:
    """A text with spaces up to a width: behind it, or before it at side "r"."""
    spaces = " " * (width - columns(text))
    return spaces + text if side == "r" else text + spaces


def columns(text: str) -> int:
    """How wide a terminal shows a text."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def cut(text: str, width: int, mark: str = "") -> str:
    """A text as it is, or its beginning and the mark where it is wider."""
    if columns(text) <= width:
        return text
    while columns(text) > width - len(mark):
        text = text[:-1]
    return text + mark


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a paragraph; `indent` stands before all but the first."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def printable(text: str) -> str:
    """A text in which all that a terminal would act on, and that would break a line, is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def quoted(text: str | None, token_id: int, width: int) -> str:
    """A token's text in quotes, cut where it is long; its id, where it is no text of its own."""
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return f"token {token_id}"
    shown = repr(text)
    return shown if columns(shown) <= width else cut(shown, width - 4) + "...'"


def seconds(value: float) -> str:
    """A time for people: 3 digits."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def shown(value: object) -> str:
    """A value for a message: short, and whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write the longest
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes | Sequence) and len(value) > 1000:
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except Exception:  # a list that holds such a number, or one that holds itself a thousand times
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."
