"""Tables as numpy arrays: `open_tables`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import write_store

import stem_edge
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.rows.table_arrays import Tables, open_tables
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout

VOCAB, WIDTH, PER_SHARD = 600, 16, 260
LAYOUT = RecordLayout(records=VOCAB, layers=(1, 4), parts=((WIDTH,),), row_type="fp32")


def expected(ids: Any, layer: int) -> F32:
    """Rows that say which id, layer and column they are."""
    tokens = np.arange(VOCAB, dtype=np.float32)[:, None]
    columns = np.arange(WIDTH, dtype=np.float32) / 100
    rows: F32 = (tokens + columns + np.float32(layer * 1000))[ids]
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundle") / "tables.zarr"
    everything = slice(None)
    records = pack_records(LAYOUT, [expected(everything, 1), expected(everything, 4)])
    write_store(root, LAYOUT, records, PER_SHARD)
    return root


@pytest.fixture
def tables(root: Path) -> Iterator[Tables]:
    with open_tables(root) as opened:
        yield opened


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize(
    "ids",
    [
        *[0, 259, 260, VOCAB - 1, np.int64(5), np.uint8(7), np.array(300)],
        *[
            [],
            (),
            np.array([], np.int64),
            slice(5, 5),
            [3],
            [599, 0, 260, 259],
            [7, 7, 7],
            range(250, 270),
            (1, 2),
        ],
        *[np.array([5, 599], np.int32), np.array([5, 599], np.uint64)],
        *[np.array([0, 255], np.uint8), np.array([0, 127], np.int8)],
        *[slice(None), slice(255, 265), slice(590, 9999), slice(-3, None), slice(None, None, -7)],
    ],
    ids=repr,
)
def test_rows_of_ids(tables: Tables, ids: Any, layer: int) -> None:
    rows = tables[ids, layer]
    assert rows.dtype == np.float32
    where = ids if isinstance(ids, slice) else np.asarray(ids, np.int64)
    assert np.array_equal(rows, expected(where, layer))


def test_a_bundle_and_its_table_folder_open_alike(root: Path) -> None:
    with stem_edge.open_tables(str(root.parent)) as tables:
        assert np.array_equal(tables[3, 4], expected(3, 4))


def test_tokens_that_share_records(tmp_path: Path) -> None:
    layout = RecordLayout(records=2, layers=(1,), parts=((2, 16),), row_type="fp32")
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_store(tmp_path / "t", layout, pack_records(layout, [rows]), 1, index=[1, 0, 1, 1])
    with open_tables(tmp_path / "t") as tables:
        assert tables.shape == (4, 1, 32)
        assert np.array_equal(tables[:, 1], rows[[1, 0, 1, 1]])
        assert np.array_equal(tables[3, 1], rows[1])
        with pytest.raises(InputError, match=r"not in 0\.\.3"):
            tables[4, 1]


@pytest.mark.parametrize("per_shard", [1, 3])
def test_rare_tokens(tmp_path: Path, per_shard: int) -> None:
    fields: dict[str, Any] = {"layers": (1, 4), "parts": ((32,),), "group_size": 16}
    wide = RecordLayout(records=7, row_type="int8", **fields)
    rare = RecordLayout(records=4, row_type="int4", **fields)
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(7, 32)).astype(np.float32) for _ in range(2)]
    stored = (
        pack_records(wide, [row[:3] for row in rows]),
        pack_records(rare, [row[3:] for row in rows]),
    )
    index = [6, 2, 0, 1, 3, 5, 4]
    write_store(tmp_path / "t", wide, stored[0], per_shard, index, (rare, stored[1]))
    with open_tables(tmp_path / "t") as tables:
        for position, layer in enumerate((1, 4)):
            parts = [wide.unpack(stored[0], position), rare.unpack(stored[1], position)]
            every = np.concatenate(parts)[index]
            assert np.array_equal(tables[:, layer], every)
            for ids in ([1, 2, 3], [0, 4], 6, [], [5, 1, 5]):
                assert np.array_equal(tables[ids, layer], every[np.array(ids, np.int64)])
        assert tables.records(np.array([0])).shape == (1, wide.record_nbytes)
