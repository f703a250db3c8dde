import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.storage import LocalStore

from stem_edge.errors import BundleError
from stem_edge.quantize import U8
from stem_edge.rows import RecordLayout
from stem_edge.shards import (
    ARRAY,
    MAX_JSON_NBYTES,
    ShardGrid,
    array_metadata,
    crc32c,
    encode_metadata,
    group_metadata,
    open_grid,
)

# Three records of 20 bytes, two in a shard; the second is all zero.
LAYOUT = RecordLayout(vocab_size=3, layers=(1,), d_ff=16, row_type="int8", group_size=16)
RECORDS = np.array([range(20), [0] * 20, range(100, 120)], np.uint8)
EMPTY_PAIR = (2**64 - 1, 2**64 - 1)


def write_store(root: Path, layout: RecordLayout, records: U8, records_per_shard: int) -> ShardGrid:
    grid = ShardGrid(root=root, layout=layout, records_per_shard=records_per_shard)
    (root / ARRAY).mkdir(parents=True)
    (root / "zarr.json").write_bytes(encode_metadata(group_metadata(layout)))
    metadata = array_metadata(layout, records_per_shard)
    (root / ARRAY / "zarr.json").write_bytes(encode_metadata(metadata))
    for shard in range(grid.shards):
        path = grid.shard_path(shard)
        path.parent.mkdir(parents=True)
        start = shard * records_per_shard
        piece = records[start : start + records_per_shard]
        path.write_bytes(grid.seal(piece) + grid.index_bytes(shard))
    return grid


@pytest.fixture
def grid(tmp_path: Path) -> ShardGrid:
    return write_store(tmp_path / "tables.zarr", LAYOUT, RECORDS, records_per_shard=2)


def slow_crc32c(data: bytes) -> bytes:
    """Castagnoli's polynomial bit by bit, to check the library and where sums are placed."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return struct.pack("<I", value ^ 0xFFFFFFFF)


def summed(data: bytes) -> bytes:
    return data + slow_crc32c(data)


def index(*pairs: tuple[int, int]) -> bytes:
    return summed(b"".join(struct.pack("<QQ", *pair) for pair in pairs))


def test_crc32c_of_the_known_string() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert slow_crc32c(b"123456789") == struct.pack("<I", 0xE3069283)


def test_exact_bytes_of_a_full_shard(grid: ShardGrid) -> None:
    records = summed(bytes(range(20))) + summed(bytes(20))
    assert grid.shard_path(0).read_bytes() == records + index((0, 24), (24, 24))


def test_exact_bytes_of_a_partial_shard(grid: ShardGrid) -> None:
    records = summed(bytes(range(100, 120)))
    assert grid.shard_path(1).read_bytes() == records + index((0, 24), EMPTY_PAIR)


def test_a_store_opens_as_it_was_written(grid: ShardGrid) -> None:
    found = open_grid(grid.root)
    assert found == grid
    assert [found.shard_records(shard) for shard in range(found.shards)] == [2, 1]
    for shard in range(found.shards):
        found.check_shard(shard)


def test_zarr_writes_the_same_bytes(grid: ShardGrid, tmp_path: Path) -> None:
    root = tmp_path / "by_zarr"
    array = zarr.create_array(
        LocalStore(root),
        name=ARRAY,
        shape=RECORDS.shape,
        dtype="uint8",
        shards=(2, 20),
        chunks=(1, 20),
        serializer=BytesCodec(),
        compressors=[Crc32cCodec()],
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    array[:] = RECORDS
    for shard in range(2):
        ours = grid.shard_path(shard)
        assert (root / ours.relative_to(grid.root)).read_bytes() == ours.read_bytes()
    assert json.loads((root / ARRAY / "zarr.json").read_bytes()) == array_metadata(LAYOUT, 2)


def test_zarr_reads_the_records(grid: ShardGrid) -> None:
    group = zarr.open_group(grid.root, mode="r")
    records = group[ARRAY]
    assert isinstance(records, zarr.Array)
    assert np.array_equal(np.asarray(records[:]), RECORDS)
    attributes = group.attrs["stem_edge"]
    assert attributes == json.loads(json.dumps(group_metadata(LAYOUT)))["attributes"]["stem_edge"]


def test_one_shard_may_hold_everything(tmp_path: Path) -> None:
    grid = write_store(tmp_path, LAYOUT, RECORDS, records_per_shard=3)
    assert open_grid(tmp_path).shards == 1
    grid.check_shard(0)


INDEX_AT = 2 * 24


def replaced_index(*pairs: tuple[int, int]) -> Callable[[bytes], bytes]:
    return lambda data: data[:INDEX_AT] + index(*pairs)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:30], id="cut in data"),
        pytest.param(lambda data: data[:-5], id="cut in index"),
        pytest.param(lambda data: data + b"\0", id="longer"),
        pytest.param(lambda data: data[24:], id="a record less"),
    ],
)
def test_a_shard_of_another_size(grid: ShardGrid, damage: Callable[[bytes], bytes]) -> None:
    path = grid.shard_path(0)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(BundleError) as caught:
        grid.check_shard(0)
    found = len(damage(whole))
    assert f"{path}: shard has {found} bytes, expected {len(whole)}" in str(caught.value)
    assert "copy or export the bundle again" in str(caught.value)


@pytest.mark.parametrize("at", range(INDEX_AT, INDEX_AT + 36))
def test_any_flipped_bit_of_the_index(grid: ShardGrid, at: int) -> None:
    path = grid.shard_path(0)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)
    with pytest.raises(BundleError) as caught:
        grid.check_shard(0)
    assert str(caught.value).startswith(f"{path}: shard index is damaged")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(replaced_index((24, 24), (0, 24)), id="swapped"),
        pytest.param(replaced_index((0, 24), (0, 24)), id="overlapping"),
        pytest.param(replaced_index((0, 24), EMPTY_PAIR), id="last one empty"),
        pytest.param(replaced_index(EMPTY_PAIR, EMPTY_PAIR), id="all empty"),
        pytest.param(replaced_index((0, 24), (24, 20)), id="shorter"),
        pytest.param(replaced_index((0, 24), (24, 2**63)), id="beyond the file"),
        pytest.param(replaced_index((2**64 - 24, 24), (24, 24)), id="offset that wraps"),
    ],
)
def test_an_index_with_a_right_checksum_but_wrong_entries(
    grid: ShardGrid, damage: Callable[[bytes], bytes]
) -> None:
    path = grid.shard_path(0)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BundleError) as caught:
        grid.check_shard(0)
    assert str(caught.value).startswith(f"{path}: shard index is damaged or not dense")


def test_places_beyond_the_vocabulary_must_be_empty(grid: ShardGrid) -> None:
    path = grid.shard_path(1)
    path.write_bytes(path.read_bytes()[:24] + index((0, 24), (0, 24)))
    with pytest.raises(BundleError, match="not dense"):
        grid.check_shard(1)


def test_a_missing_shard(grid: ShardGrid) -> None:
    path = grid.shard_path(1)
    path.unlink()
    with pytest.raises(BundleError) as caught:
        grid.check_shard(1)
    assert str(caught.value).startswith(f"{path}: cannot read this shard (No such file")


def test_a_folder_in_place_of_a_shard(grid: ShardGrid) -> None:
    path = grid.shard_path(1)
    path.unlink()
    path.mkdir()
    with pytest.raises(BundleError, match=r"shard has|cannot read"):
        grid.check_shard(1)


def edit(path: Path, where: str, value: object) -> None:
    """Set, or with `...` delete, the value at a path of a JSON file, written with spaces."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    *parents, last = where.split(" ")
    target: Any = document
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    if value is ...:
        del target[last]
    else:
        target[int(last) if isinstance(target, list) else last] = value
    path.write_text(json.dumps(document))


CODECS = "codecs 0 configuration"
GRID = "chunk_grid configuration chunk_shape"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("shape", [4, 20]), ("shape", [3, 24]), ("shape", [3]), ("shape", "3"), ("shape", None)],
        *[("shape 0", 10**30), ("shape 0", -3), ("shape 0", 3.5), ("shape 1", 2**64)],
        *[("data_type", "int8"), ("data_type", "float32"), ("fill_value", 1)],
        *[("zarr_format", 2), ("zarr_format", "3"), ("node_type", "group")],
        *[(GRID, [2]), (GRID, []), (GRID, [2, 10]), (f"{GRID} 0", 0), (f"{GRID} 0", -2)],
        *[(f"{GRID} 0", 4), (f"{GRID} 0", 2.0), (f"{GRID} 0", True), (f"{GRID} 0", 10**30)],
        *[("chunk_grid name", "rectilinear"), ("chunk_grid", [])],
        *[("chunk_key_encoding configuration separator", ".")],
        *[("chunk_key_encoding name", "v2")],
        *[("codecs", []), ("codecs", [{"name": "bytes"}]), (f"{CODECS} index_location", "start")],
        *[(f"{CODECS} codecs", [{"name": "bytes"}]), (f"{CODECS} index_codecs", [])],
        *[(f"{CODECS} codecs 1 name", "gzip"), (f"{CODECS} chunk_shape", [2, 20])],
        *[("storage_transformers", [{"name": "x"}]), ("unknown", 1)],
        *[(field, ...) for field in ("zarr_format", "node_type", "shape", "data_type", "codecs")],
        *[(field, ...) for field in ("chunk_grid", "chunk_key_encoding", "fill_value")],
    ],
)
def test_array_metadata_of_another_kind(grid: ShardGrid, where: str, value: object) -> None:
    path = grid.root / ARRAY / "zarr.json"
    edit(path, where, value)
    assert_refused(grid.root, path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("zarr_format", 2), ("node_type", "array"), ("unknown", 1), ("attributes", [])],
        *[("zarr_format", ...), ("node_type", ...), ("attributes", ...)],
    ],
)
def test_group_metadata_of_another_kind(grid: ShardGrid, where: str, value: object) -> None:
    path = grid.root / "zarr.json"
    edit(path, where, value)
    assert_refused(grid.root, path)


LAYOUT_AT = "attributes stem_edge"
WRONG_LAYOUTS: dict[str, list[object]] = {
    LAYOUT_AT: [..., None, [], 7],
    f"{LAYOUT_AT} vocab_size": [..., "3", 3.0, True, 4, 2],
    f"{LAYOUT_AT} d_ff": [32, 0, -16, 10**30, "16"],
    f"{LAYOUT_AT} layers": [[], [1, 2], [1.0], 1],
    f"{LAYOUT_AT} row_type": ["int4", "int3", 8],
    f"{LAYOUT_AT} group_size": [0, 8, 32, -16],
    f"{LAYOUT_AT} unknown": [1],
}


@pytest.mark.parametrize("where", WRONG_LAYOUTS)
def test_layouts_that_are_wrong_or_contradict_the_array(grid: ShardGrid, where: str) -> None:
    path = grid.root / "zarr.json"
    original = path.read_bytes()
    for value in WRONG_LAYOUTS[where]:
        path.write_bytes(original)
        edit(path, where, value)
        # A layout can contradict the array: then either file may be the wrong one.
        assert_refused(grid.root, grid.root)


def assert_refused(root: Path, named: Path) -> None:
    with pytest.raises(BundleError) as caught:
        open_grid(root)
    message = str(caught.value)
    assert str(named) in message
    assert message.endswith("export the bundle again")
    assert "\n" not in message


BOTH = pytest.mark.parametrize("name", ["zarr.json", f"{ARRAY}/zarr.json"])


@BOTH
@pytest.mark.parametrize(
    "data",
    [
        *[b"", b"{", b"[]", b"null", b"{}{}", b'{"a": NaN}', b"\xef\xbb\xbf{}", b'{"a": "\xff"}'],
        *[b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ],
    ids=lambda data: repr(data[:12]),
)
def test_not_json(grid: ShardGrid, name: str, data: bytes) -> None:
    path = grid.root / name
    path.write_bytes(data)
    with pytest.raises(BundleError) as caught:
        open_grid(grid.root)
    assert str(caught.value).startswith(f"{path}: not a zarr.json (")


@BOTH
def test_json_that_is_too_large(grid: ShardGrid, name: str) -> None:
    path = grid.root / name
    data = path.read_bytes()
    path.write_bytes(data + b" " * (MAX_JSON_NBYTES - len(data)))
    assert open_grid(grid.root) == grid
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BundleError) as caught:
        open_grid(grid.root)
    assert f"{path}: not a zarr.json (larger than {MAX_JSON_NBYTES} bytes)" in str(caught.value)


@BOTH
def test_missing_json(grid: ShardGrid, name: str) -> None:
    path = grid.root / name
    path.unlink()
    with pytest.raises(BundleError) as caught:
        open_grid(grid.root)
    assert str(caught.value).startswith(f"{path}: cannot read (No such file")
    assert "the bundle is incomplete" in str(caught.value)


@pytest.fixture
def two_seconds() -> Iterator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        pytest.fail("still waiting after 2 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(2)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@BOTH
@pytest.mark.usefixtures("two_seconds")
def test_a_pipe_in_place_of_json_is_refused_without_waiting(grid: ShardGrid, name: str) -> None:
    path = grid.root / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError) as caught:
        open_grid(grid.root)
    assert str(path) in str(caught.value)
