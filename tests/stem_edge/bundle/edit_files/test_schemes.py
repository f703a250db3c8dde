"""Schemes of the paper's section 3.3, written out by hand, and invariants for all lengths."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from stem_edge.bundle.edit_files.schemes import FITS, SCHEMES, Scheme, align, choose_scheme
from stem_edge.errors import InputError

A, B, C, PAD = 10, 11, 12, 99
LENGTHS = range(1, 9)


def aligned(scheme: Scheme, length: int, target: list[int], **options: Any) -> list[int]:
    """Return the token that each token looks up, where it is a single one."""
    found = align(scheme, length, target, **({"pad": PAD} | options))
    assert all(len(lookup) == 1 for lookup in found)
    return [lookup[0] for lookup in found]


@pytest.mark.parametrize(
    ("scheme", "length", "target", "expected"),
    [
        ("swap", 1, [A], [A]),
        ("swap", 3, [A, B, A], [A, B, A]),
        ("pad-left", 5, [A, B], [PAD, PAD, PAD, A, B]),
        ("pad-left", 2, [A, B], [A, B]),
        ("pad-right", 5, [A, B], [A, B, PAD, PAD, PAD]),
        ("pad-right", 1, [A], [A]),
        ("copy", 7, [A, B, C], [A, A, B, B, C, C, C]),
        # United States of America -> Czech Republic, in words: 4 and 2.
        ("copy", 4, [A, B], [A, A, B, B]),
        ("auto", 2, [A, B], [A, B]),
        ("auto", 5, [A, B], [A, A, B, B, B]),
    ],
)
def test_as_the_paper_has_it(
    scheme: Scheme, length: int, target: list[int], expected: list[int]
) -> None:
    assert aligned(scheme, length, target) == expected


def test_the_mean_is_of_all_target_rows_at_every_token() -> None:
    assert align("average", 2, [A, B, C]) == [(A, B, C), (A, B, C)]
    assert align("average", 3, [A]) == [(A,)] * 3
    assert align("auto", 1, [A, B]) == [(B,)]
    # "bora bora" is a mean of four rows.
    assert align("average", 1, [A, B, A, B]) == [(A, B, A, B)]


@pytest.mark.parametrize(("length", "count"), [*product(LENGTHS, LENGTHS)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_for_all_lengths(scheme: Scheme, length: int, count: int) -> None:
    target = list(range(count))
    sign = (length > count) - (length < count)
    if scheme != "auto" and sign not in FITS[scheme]:
        with pytest.raises(InputError, match="does not fit a source of") as raised:
            align(scheme, length, target, pad=PAD)
        assert all(name in str(raised.value) for name in FITS if sign in FITS[name])
        return
    found = align(scheme, length, target, pad=PAD)
    assert len(found) == length
    if choose_scheme(scheme, length, count) == "average":
        assert found == [tuple(target)] * length
        return
    tokens = [lookup[0] for lookup in found]
    uses = Counter(tokens)
    mine = [token for token in tokens if token != PAD]
    assert mine == sorted(mine)  # the target's order
    if sign >= 0:
        assert set(mine) == set(target)  # so that no token of the target is lost
    if sign == 0:
        assert tokens == target
    if scheme == "copy":
        assert PAD not in uses
        assert all(uses[token] == length // count for token in target[:-1])
        assert uses[count - 1] == length // count + length % count
    if scheme == "subset":
        assert max(uses.values()) == 1
    if scheme.startswith("pad") and sign:
        assert uses[PAD] == length - count
        padding = [PAD] * uses[PAD]
        assert tokens == (padding + target if scheme == "pad-left" else target + padding)
