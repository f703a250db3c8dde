"""Tables, paragraphs and texts for a terminal."""

from __future__ import annotations

import pytest

from stem_edge.shown import printable
from stem_edge.text_table import columns, fill, table


def test_columns_line_up_and_stay_apart() -> None:
    rows = [("", "bits", "what"), ("東京", "4", "x"), ("abc", "1,000")]
    assert table(rows, "lrl") == ["       bits  what", "東京      4  x", "abc   1,000"]
    assert table([("a", "1"), ("bb", "22")]) == ["a    1", "bb  22"]
    assert table([]) == []


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("東京", 4), ("e\N{COMBINING ACUTE ACCENT}", 1), ("", 0)]
)
def test_widths_are_those_of_a_terminal(text: str, width: int) -> None:
    assert columns(text) == width
    assert columns(fill(text, 9)) == columns(fill(text, 9, "r")) == 9


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    assert printable("a\tb\x1b\u00e9\u202e\\") == "a\\tb\\x1b\u00e9\\u202e\\"
