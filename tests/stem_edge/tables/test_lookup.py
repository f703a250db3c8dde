"""Contents of composed records, for every type of row."""

from __future__ import annotations

import numpy as np
import pytest

from stem_edge.numerics.block_search import least_error_scales
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.codecs import RowType
from stem_edge.tables.composing import compose
from stem_edge.tables.packing import make_layout, pack_records
from stem_edge.tables.rows import RecordLayout, ScaleType

V, LAYERS = 12, (1, 4, 5)


def layout_of(
    row_type: RowType, *parts: tuple[int, ...], scales: ScaleType = "fp32"
) -> RecordLayout:
    return make_layout(V, LAYERS, parts, row_type, 32, scales)


LAYOUTS = {
    "fp32": layout_of("fp32", (24,)),
    "fp16": layout_of("fp16", (24,)),
    "int8": layout_of("int8", (64,)),
    "int8, fp16 scales": layout_of("int8", (64,), scales="fp16"),
    "int4": layout_of("int4", (64,)),
    "low rank": layout_of("int8", (16,)),
    "experts": layout_of("fp32", (6, 4), (4, 3)),
    "int4 experts": layout_of("int4", (6, 32), (4, 16)),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> RecordLayout:
    return LAYOUTS[request.param]


def make_rows(layout: RecordLayout, seed: int = 0) -> list[F32]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(V, layout.row_width)).astype(np.float32) for _ in layout.layers]


@pytest.fixture
def records(layout: RecordLayout) -> U8:
    return pack_records(layout, make_rows(layout), least_error_scales)


def of_all(records: U8) -> dict[int, U8]:
    return dict(enumerate(records))


def test_each_layer_has_its_own_row(layout: RecordLayout, records: U8) -> None:
    made = compose(layout, ((3,), (7,), (3,)), of_all(records))[None]
    for index, token in enumerate((3, 7, 3)):
        # Equal bit for bit, because rows looked up elsewhere must not be rounded again.
        assert np.array_equal(
            layout.row_codes(made, index)[0], layout.row_codes(records, index)[token]
        )
        assert np.array_equal(layout.unpack(made, index)[0], layout.unpack(records, index)[token])


def test_a_mean_is_as_near_as_its_type_allows(layout: RecordLayout, records: U8) -> None:
    made = compose(layout, ((2, 5, 9),) * len(LAYERS), of_all(records))[None]
    steps = {"fp32": 0.0, "fp16": 2.0**-11, "int8": 2.0**-8, "int4": 2.0**-3}
    for index in range(len(LAYERS)):
        rows = layout.unpack(records, index)[[2, 5, 9]]
        exact = (rows[0] + rows[1] + rows[2]) / np.float32(3)
        off = np.abs(layout.unpack(made, index)[0] - exact).max()
        assert off <= steps[layout.row_type] * np.abs(exact).max() * 1.01
        assert layout.unpack(made, index)[0].tobytes() == (
            layout.unpack(
                pack_records(layout, [exact[None]] * len(LAYERS), least_error_scales), index
            )[0].tobytes()
        )
