"""How a prompt is cut into steps."""

from __future__ import annotations

from itertools import product

import numpy as np

from stem_edge.runtime.engine import starts_of


def test_a_prompt_is_cut_into_pairs_with_no_token_left_alone() -> None:
    for length, size in product(range(1, 40), (4, 5, 6, 16, 17, 128)):
        counts = np.diff([*starts_of(length, size), length]).tolist()
        assert sum(counts) == length and max(counts) <= size
        assert all(count % 2 == 0 for count in counts[:-1])
        assert counts[-1] > 1 or length == 1
