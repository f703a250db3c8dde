"""The group of a table store: its format, its arrays, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zarr
from changing import edit
from shard_bytes import LAYOUT, RECORDS
from stores import write_store

from stem_edge.errors import BundleError
from stem_edge.limits import MAX_RECORDS
from stem_edge.numerics.quantizing import unpack_codes
from stem_edge.tables.codecs import Form, RowType
from stem_edge.tables.packing import make_layout, pack_records
from stem_edge.tables.rows import ScaleType
from stem_edge.tables.shards import open_table_store
from stem_edge.tables.store import TableFormat
from stem_edge.tables.widening import widen

PLAIN = TableFormat(tokens=3, stored=LAYOUT)
# Of four records, of which two are rare, and six tokens.
TABLES = msgspec.structs.replace(LAYOUT, records=4)
RARE = msgspec.structs.replace(LAYOUT, records=2, row_type="int4")
RARE_RECORDS = np.array([range(12), range(50, 62)], np.uint8)
MIXED = TableFormat(tokens=6, stored=TABLES, rare_tables=RARE, indexed=True)
INDEX = [3, 1, 0, 2, 2, 2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_store(tmp_path / "tables.zarr", LAYOUT, RECORDS, records_per_shard=2)
    return tmp_path / "tables.zarr"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    root = tmp_path / "mixed.zarr"
    write_store(root, TABLES, RECORDS[:2], 2, index=INDEX, rare=(RARE, RARE_RECORDS))
    return root


def test_zarr_opens_every_array(mixed: Path) -> None:
    group = zarr.open_group(mixed, mode="r")
    expected = {"records": RECORDS[:2], "rare_records": RARE_RECORDS, "index": np.array(INDEX)}
    assert set(group) == set(expected)
    for name, values in expected.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(np.asarray(array[:]), values)
    layout = {"layers": [1], "parts": [[16]], "group_size": 16, "scale_type": "fp32"}
    assert group.attrs["stem_edge"] == {
        "tokens": 6,
        "tables": layout | {"records": 4, "row_type": "int8"},
        "rare_tables": layout | {"records": 2, "row_type": "int4"},
        "indexed": True,
    }


WIDENED: list[tuple[RowType, RowType, Form]] = [
    ("int2", "int2", "int4"), ("int4", "int2", "int4"),
    ("int8", "int2", "int8"), ("int8", "int4", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("usual", "stored", "form"), WIDENED)
@pytest.mark.parametrize("scales", get_args(ScaleType))
def test_records_widen(usual: RowType, stored: RowType, form: Form, scales: ScaleType) -> None:
    """Every code, in every layer: the same value, and the same bytes of its scale."""
    layout = make_layout(5, (0, 2), ((16, 16),), stored, 16, scales)
    format = TableFormat(tokens=5, stored=layout)
    if usual != stored:
        wide = msgspec.structs.replace(layout, records=9, row_type=usual)
        format = TableFormat(tokens=9, stored=wide, rare_tables=layout, indexed=True)
    tables, rng = format.tables, np.random.default_rng(0)
    assert (tables.row_type, format.kind) == (form, stored if usual == stored else "mixed")
    narrow = pack_records(layout, [rng.normal(size=(5, 256)).astype(np.float32) for _ in range(2)])
    found = widen(layout, narrow, tables)
    for index in range(2):
        assert np.array_equal(tables.unpack(found, index), layout.unpack(narrow, index))
        assert np.array_equal(tables.row_scales(found, index), layout.row_scales(narrow, index))
    codes = unpack_codes(tables.row_codes(found, 0).view(np.uint8), tables.bits)
    assert len(np.unique(codes)) == 1 << layout.bits


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tokens": 7, "indexed": False, "rare_tables": None},
            "4 records of 7 tokens, but no index",
        ),
        ({"tokens": 0}, "tables of 0 tokens"),
        ({"tokens": MAX_RECORDS + 1}, f"expected 1 to {MAX_RECORDS}"),
        ({"tokens": 4, "indexed": False}, "rare tables, but no index"),
        *[
            ({"rare_tables": msgspec.structs.replace(RARE, **change)}, "do not widen")
            for change in (
                {"row_type": "int8"}, {"records": 4}, {"records": 5}, {"layers": (2,)},
                {"parts": ((32,),)}, {"scale_type": "fp16"},
            )
        ],
        ({"stored": msgspec.structs.replace(TABLES, row_type="int4")}, "do not widen"),
    ],
)  # fmt: skip
def test_formats_that_cannot_exist(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(MIXED, **changes)


def assert_refused(root: Path, named: Path) -> None:
    with pytest.raises(BundleError) as caught:
        open_table_store(root)
    message = str(caught.value)
    assert str(named) in message
    assert message.endswith("export the bundle again")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("zarr_format", 2), ("node_type", "array"), ("unknown", 1), ("attributes", [])],
        *[("zarr_format", ...), ("node_type", ...), ("attributes", ...)],
    ],
)
def test_group_metadata_of_another_kind(root: Path, where: str, value: object) -> None:
    path = root / "zarr.json"
    edit(path, where, value)
    assert_refused(root, path)


LAYOUT_AT = "attributes stem_edge"
TABLES_AT = f"{LAYOUT_AT} tables"
WRONG_LAYOUTS: dict[str, list[object]] = {
    LAYOUT_AT: [..., None, [], 7],
    f"{LAYOUT_AT} tokens": [..., "3", 3.0, True, 4, 0, 10**30],
    f"{LAYOUT_AT} indexed": [..., None, 1],
    f"{LAYOUT_AT} rare_tables": [..., {}, 1],
    f"{LAYOUT_AT} unknown": [1],
    f"{TABLES_AT} records": [..., "3", 3.0, True, 4, 2],
    f"{TABLES_AT} parts": [
        [[32]], [[0]], [[-16]], [[10**30]], [["16"]], [16], [], [[]], [[16], [16]],
    ],
    f"{TABLES_AT} layers": [[], [1, 2], [1.0], 1],
    f"{TABLES_AT} row_type": ["int4", "int3", 8],
    f"{TABLES_AT} group_size": [0, 8, 32, -16],
    f"{TABLES_AT} scale_type": [..., "fp16", "bf16"],
    f"{TABLES_AT} unknown": [1],
}  # fmt: skip


@pytest.mark.parametrize("where", WRONG_LAYOUTS)
def test_layouts_that_are_wrong_or_contradict_the_array(root: Path, where: str) -> None:
    path = root / "zarr.json"
    original = path.read_bytes()
    for value in WRONG_LAYOUTS[where]:
        path.write_bytes(original)
        edit(path, where, value)
        # If layout and array contradict each other, either file may be the wrong one.
        assert_refused(root, root)
