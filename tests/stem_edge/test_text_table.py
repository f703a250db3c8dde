"""Tables, paragraphs and texts for a terminal."""

from __future__ import annotations

import pytest

from stem_edge.shown import printable
from stem_edge.text_table import columns, cut, fill, quoted, seconds, table, wrapped


def test_columns_line_up_and_stay_apart() -> None:
    rows = [("", "bits", "what"), ("東京", "4", "x"), ("abc", "1,000")]
    assert table(rows, "lrl") == ["       bits  what", "東京      4  x", "abc   1,000"]
    assert table([("a", "1"), ("bb", "22")]) == ["a    1", "bb  22"]
    assert table([]) == []


def test_a_table_too_wide_for_a_terminal_is_narrower() -> None:
    narrow, wide = table([("x" * 38, "y" * 40)]), table([("x" * 39, "y" * 40)])
    assert [line.count(" ") for line in (*narrow, *wide)] == [2, 1]


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("東京", 4), ("e\N{COMBINING ACUTE ACCENT}", 1), ("", 0)]
)
def test_widths_are_those_of_a_terminal(text: str, width: int) -> None:
    assert columns(text) == width
    assert columns(fill(text, 9)) == columns(fill(text, 9, "r")) == 9


def test_long_texts_are_cut() -> None:
    assert (cut("abcdef", 6), cut("abcdef", 5, ".."), cut("東京都", 5)) == (
        "abcdef",
        "abc..",
        "東京",
    )
    assert quoted(" Paris", 5, 16) == "' Paris'"
    assert quoted("x" * 30, 5, 16) == "'xxxxxxxxxxx...'"
    assert quoted(None, 5, 16) == quoted("", 5, 16) == quoted("\ufffd", 5, 16) == "token 5"


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    assert printable("a\tb\x1b\u00e9\u202e\\") == "a\\tb\\x1b\u00e9\\u202e\\"


def test_paragraphs_and_times() -> None:
    lines = wrapped("word " * 40, "  ")
    assert max(map(len, lines)) <= 80 and all(line.startswith("  ") for line in lines[1:])
    assert (seconds(1.234), seconds(0.01234)) == ("1.23 s", "12.3 ms")
