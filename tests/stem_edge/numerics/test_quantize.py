"""Block quantization: codes, scales, and agreement with onnxruntime."""

import pytest

from stem_edge.numerics.quantize import fitting_block


@pytest.mark.parametrize(
    ("width", "wanted", "block"),
    [
        *[(256, 32, 32), (256, 256, 256), (256, 512, 256), (256, 100, 64), (16, 16, 16)],
        *[(96, 64, 32), (48, 32, 16), (8192, 128, 128), (11008, 128, 128)],
        *[(24, 32, 0), (17, 64, 0), (8, 8, 0), (256, 15, 0), (256, 0, 0), (256, -32, 0)],
    ],
)
def test_fitting_block(width: int, wanted: int, block: int) -> None:
    assert fitting_block(width, wanted) == block
