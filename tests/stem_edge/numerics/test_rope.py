"""RoPE: the tables of angles."""

import numpy as np
import pytest

from stem_edge.export.checkpoints.gguf_keys import frequency_factors
from stem_edge.layers import Llama3Rope, ProportionalRope, Rope, RopeScaling
from stem_edge.numerics.rope import rope_frequencies, rope_tables


def test_a_position_has_the_same_values_in_any_table() -> None:
    """Bit for bit, at angles so large that float32 keeps no digit after the point, too."""
    rope = Rope(10, 1e4, None)  # not a multiple of what a processor computes at once
    whole = rope_tables(rope, 100_000)
    for start, stop in ((0, 3), (1, 1000), (70_001, 99_999), (99_999, 100_000)):
        for part, table in zip(rope_tables(rope, stop, start), whole, strict=True):
            assert np.array_equal(part, table[start:stop])


@pytest.mark.parametrize(
    ("scaling", "infinite"),
    [(Llama3Rope(8.0, 1.0, 4.0, 64), 0), (ProportionalRope(0.25, 2.0), 6)],
    ids=["llama3", "proportional"],
)
def test_frequency_factors_divide_frequencies(scaling: RopeScaling, infinite: int) -> None:
    """Frequencies that become 0 have infinite divisors, by which any angle is 0."""
    scaled, plain = (Rope(16, 1e4, which) for which in (scaling, None))
    factors = frequency_factors(scaled)
    expected = rope_frequencies(scaled)[0]
    np.testing.assert_allclose(rope_frequencies(plain)[0] / factors, expected, rtol=1e-6)
    assert np.isinf(factors).sum() == (expected == 0).sum() == infinite
