"""The memory of a server: what its model leaves to requests."""

from __future__ import annotations

import pytest

from stem_edge.errors import InputError
from stem_edge.serving.budget import REQUESTS_NBYTES, of_model


def test_requests_take_a_part_of_the_limit() -> None:
    assert of_model(None) is None
    assert of_model("1GiB") == (1 << 30) - REQUESTS_NBYTES
    with pytest.raises(InputError, match=r"--memory is 60MB; requests take 67.2 MB of it"):
        of_model("60MB")
