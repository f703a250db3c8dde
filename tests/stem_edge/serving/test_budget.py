"""The memory of a server: what its model leaves to requests."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from stem_edge.answers.refusals import BusyError, RefusalError
from stem_edge.errors import InputError
from stem_edge.serving.budget import MOST_VALUES, REQUESTS_NBYTES, Budget, Share, of_model


def test_requests_take_a_part_of_the_limit() -> None:
    assert of_model(None) is None
    assert of_model("1GiB") == (1 << 30) - REQUESTS_NBYTES
    with pytest.raises(InputError, match=r"--memory is 60MB; requests take 67.2 MB of it"):
        of_model("60MB")


@pytest.mark.parametrize(
    ("shares", "error"),
    [
        ([MOST_VALUES, 0], None),
        ([MOST_VALUES // 2 - 9] * 3 + [500], None),
        ([500] * 600, None),
        ([MOST_VALUES + 1], RefusalError),
        ([MOST_VALUES // 2] * 3 + [MOST_VALUES // 4], BusyError),
        ([MOST_VALUES] * 2, BusyError),
    ],
)
def test_json_of_all_requests_has_a_limit(
    shares: list[int], error: type[RefusalError] | None
) -> None:
    budget = Budget()
    *others, last = [Share(budget) for _ in shares]
    for share, values in zip(others, shares, strict=False):
        share.add_json(b"," * values)
    with pytest.raises(error) if error is not None else nullcontext():
        last.add_json(b"," * shares[-1])
    if error is not None:  # what was refused takes nothing from others
        Share(budget).add_json(b"")
    for share in (*others, last):
        share.give_back()
    assert budget == Budget()
