"""Bodies of requests as structs."""

from __future__ import annotations

import pytest

from stem_edge.apps.answers.openai.chat import ChatBody
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.serving.http import decoded

EXACT = 1 << 53


@pytest.mark.parametrize(
    ("written", "value"), [("16.0", 16), ("-3.0", -3), ("4e1", 40), (f"{EXACT}.0", EXACT)]
)
def test_a_whole_number_may_be_written_as_a_float(written: str, value: int) -> None:
    assert decoded(b'{"messages": [], "seed": %s}' % written.encode(), ChatBody).seed == value


@pytest.mark.parametrize("written", ["16.5", f"{EXACT + 2}.0", "1e300"])
def test_other_floats_are_no_whole_numbers(written: str) -> None:
    with pytest.raises(RefusalError, match=r"^seed: Expected `int \| null`, got `float`$"):
        decoded(b'{"messages": [], "seed": %s}' % written.encode(), ChatBody)
