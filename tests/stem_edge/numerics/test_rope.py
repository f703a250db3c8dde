"""RoPE: the tables of angles, and rotation."""

import numpy as np
import numpy.typing as npt
import pytest
from configs import config

from stem_edge.export.checkpoints.gguf_keys import frequency_factors
from stem_edge.layers import Llama3Rope, ProportionalRope, Rope, RopeScaling
from stem_edge.numerics.arithmetic import rotate
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_frequencies, rope_tables

POSITIONS, HEADS, WIDTH = 7, 3, 8
MODEL = config(head_dim=WIDTH, rope_theta=100.0)
KINDS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])


def random_heads() -> F32:
    shape = (POSITIONS, HEADS, WIDTH)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def as_complex(heads: F32, interleaved: bool) -> npt.NDArray[np.complex128]:
    half = WIDTH // 2
    first, second = (
        (heads[..., 0::2], heads[..., 1::2])
        if interleaved
        else (heads[..., :half], heads[..., half:])
    )
    return first + 1j * second.astype(np.float64)


@KINDS
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    heads = random_heads()
    found = rotate(heads, *rope_tables(MODEL.layer(0).rope, POSITIONS), interleaved)
    speeds = 100.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    turns = np.exp(1j * np.outer(np.arange(POSITIONS), speeds))
    expected = as_complex(heads, interleaved) * turns[:, None, :]
    np.testing.assert_allclose(as_complex(found, interleaved), expected, atol=1e-6)


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
