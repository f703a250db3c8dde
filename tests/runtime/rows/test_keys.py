"""What tokens look up by the text so far, and how means of rows are laid out for graphs."""

from __future__ import annotations

import numpy as np
import pytest

from stem_edge.runtime.lookups.windows import WindowKeys, following
from stem_edge.runtime.rows.records import RowKeys
from stem_edge.tables.windows import last_rows, spread

E, END = -1, 9  # no row; the end of a document
TEXT = [4, 5, END, END, 6, 7, 8, 7]
ROWS = [[E, E, 4], [E, 4, 5], [4, 5, END], [E, E, END], [E, E, 6], [E, 6, 7], [6, 7, 8], [7, 8, 7]]


def test_a_token_looks_up_its_own_row() -> None:
    ids = np.array(TEXT)
    assert RowKeys().of(ids, ids + 100, 6).tolist() == [108, 107]
    assert following(RowKeys(), [1, 2], [3, 4]).tolist() == [3, 4]


@pytest.mark.parametrize("first", range(len(TEXT)))
def test_the_last_tokens_of_a_document(first: int) -> None:
    keys, ids = WindowKeys(3, [1, END]), np.array(TEXT)
    assert keys.of(ids, ids, first).tolist() == ROWS[first:]
    assert following(keys, TEXT[:first], TEXT[first:]).tolist() == ROWS[first:]


def test_rows_of_edits_take_the_places_of_tokens() -> None:
    found = last_rows(np.array([4, END, 4]), np.array([300, END, 301], np.int32), 0, 2, [END])
    assert found.tolist() == [[E, 300], [300, END], [E, 301]] and found.dtype == np.int32


def test_no_ends() -> None:
    ids = np.array([4, END, 4])
    assert last_rows(ids, ids, 0, 2, ()).tolist() == [[E, 4], [4, END], [END, 4]]


@pytest.mark.parametrize(("window", "most"), [(2, 127), (16, 113), (65, 64), (256, 64)])
def test_tokens_of_a_step(window: int, most: int) -> None:
    assert WindowKeys(window, ()).most == most


def test_slots_in_a_line() -> None:
    line, shares = spread(
        np.array([[[E, 5, 3], [5, 3, 0], [E, E, 7]], [[1, 1, 1], [E, 1, 2], [1, 2, 2]]])
    )
    assert line.tolist() == [[0, 5, 3, 0, 7], [1, 1, 1, 2, 2]]
    third = float(np.float32(1 / 3))
    assert shares.tolist() == [
        [[0, 0.5, 0.5, 0, 0], [0, third, third, third, 0], [0, 0, 0, 0, 1]],
        [[third, third, third, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, third, third, third]],
    ]
