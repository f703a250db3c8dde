"""Catalogue Z1 to Z10: the files of a table store. How they are read: test_reading.py."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from changing import edit
from contract import refused
from damaged_stores import FORMAT, INDEX_NBYTES, NOWHERE, RECORDS, STRIDE, index_of, shard

from stem_edge.errors import BundleError, RowReadError
from stem_edge.runtime.rows.store import open_store


def opened(root: Path) -> None:
    open_store(root, FORMAT).close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_z1_a_missing_shard_is_not_read_as_zeros(root: Path, number: int) -> None:
    """zarr itself would read the fill value."""
    shard(root, number).unlink()
    refused(partial(opened, root), BundleError, shard(root, number), kept=[root])


@pytest.mark.parametrize("left", [0, 1, STRIDE, 2 * STRIDE, 2 * STRIDE + 5, -1])
def test_z2_a_shard_that_was_cut(root: Path, left: int) -> None:
    path, whole = shard(root, 0), 2 * STRIDE + INDEX_NBYTES
    os.truncate(path, left % whole)
    said = f"{left % whole} bytes, expected {whole}"
    refused(partial(opened, root), BundleError, path, said, kept=[root])


def test_z3_a_flipped_bit_in_a_record(root: Path) -> None:
    path, neighbours = shard(root, 1), np.array([0, 1, 2, 4])
    whole = path.read_bytes()
    for at in range(STRIDE):
        data = bytearray(whole)
        data[STRIDE + at] ^= 1 << at % 8
        path.write_bytes(data)
        with open_store(root, FORMAT) as store:
            for numbers in ([3], [0, 3, 4], [3, 3]):
                refused(partial(store.read, np.array(numbers)), RowReadError, path, "record 3")
            assert np.array_equal(store.read(neighbours), RECORDS[neighbours])


def test_z4_a_flipped_bit_in_an_index(root: Path) -> None:
    path = shard(root, 2)
    whole = path.read_bytes()
    # Who finds records by arithmetic reads its checksum alone.
    for at in range(INDEX_NBYTES - 4, INDEX_NBYTES):
        data = bytearray(whole)
        data[STRIDE + at] ^= 1 << at % 8
        path.write_bytes(data)
        refused(partial(opened, root), BundleError, path, "shard index is damaged")


# By their number, shards with an index that is not dense, or calls records empty: zarr reads zeros there.
INDEXES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "swapped": (0, [(STRIDE, STRIDE), (0, STRIDE)]),
    "the same twice": (0, [(0, STRIDE), (0, STRIDE)]),
    "overlapping": (0, [(0, STRIDE), (STRIDE - 1, STRIDE)]),
    "shorter": (0, [(0, STRIDE), (STRIDE, STRIDE - 1)]),
    "of no bytes": (0, [(0, 0), (0, 0)]),
    "of other lengths": (0, [(0, 2 * STRIDE), (2 * STRIDE, 0)]),
    "past the end": (0, [(0, STRIDE), (2**40, STRIDE)]),
    "across the end": (0, [(0, STRIDE), (2 * STRIDE + 20, STRIDE)]),
    "longer than the file": (0, [(0, STRIDE), (STRIDE, 2**63)]),
    "that wraps": (0, [(2**64 - STRIDE, STRIDE), (STRIDE, STRIDE)]),
    "whose length wraps": (0, [(0, STRIDE), (STRIDE, 2**64 - STRIDE)]),
    "negative": (0, [(2**63, STRIDE), (STRIDE, STRIDE)]),
    "the first is empty": (0, [(NOWHERE, NOWHERE), (STRIDE, STRIDE)]),
    "the second is empty": (0, [(0, STRIDE), (NOWHERE, NOWHERE)]),
    "both are empty": (0, [(NOWHERE, NOWHERE), (NOWHERE, NOWHERE)]),
    "the last is empty": (2, [(NOWHERE, NOWHERE), (NOWHERE, NOWHERE)]),
    "a place beyond the last is not": (2, [(0, STRIDE), (0, STRIDE)]),
    "half empty": (0, [(NOWHERE, STRIDE), (STRIDE, STRIDE)]),
}


@pytest.mark.parametrize("case", INDEXES)
def test_z5_z6_an_index_that_is_not_dense_with_a_valid_checksum(root: Path, case: str) -> None:
    number, pairs = INDEXES[case]
    path = shard(root, number)
    records = path.read_bytes()[:-INDEX_NBYTES]
    path.write_bytes(records + index_of(*pairs))
    refused(partial(opened, root), BundleError, path, "not dense", f"at byte {len(records)}")


@pytest.mark.parametrize("more", [1, STRIDE, 1 << 30])
def test_z7_a_shard_that_is_longer(root: Path, more: int) -> None:
    path, whole = shard(root, 0), 2 * STRIDE + INDEX_NBYTES
    os.truncate(path, whole + more)
    refused(partial(opened, root), BundleError, path, f"{whole + more} bytes, expected {whole}")


GRID = "chunk_grid configuration chunk_shape"
INNER = "codecs 0 configuration"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("shape", [2**62, 20]), ("shape", []), ("shape", [-5, 20]), ("shape", [2**63, 2**63])],
        *[(GRID, [2**40, 20]), (GRID, [0, 20]), (GRID, []), (GRID, [2, 2**62])],
        *[(f"{INNER} chunk_shape", [0, 20]), (f"{INNER} chunk_shape", [2**40, 20])],
        *[("data_type", "uint16"), ("data_type", "int8"), ("data_type", "float64")],
        (f"{INNER} index_codecs 0 configuration endian", "big"),
        *[(f"{INNER} index_location", "start"), ("fill_value", 7), ("fill_value", float("inf"))],
        # Codecs that are not ours.
        *[("zarr_format", 2), ("data_type", "object"), ("data_type", "|O"), ("unknown", 1)],
        *[
            ("codecs", []),
            ("codecs", [{"name": "bytes"}]),
            (f"{INNER} codecs", [{"name": "bytes"}]),
        ],
        *[(f"{INNER} index_codecs", []), (f"{INNER} codecs 1 name", "gzip")],
        ("codecs", [{"name": "numcodecs.pickle"}]),
        ("codecs", [{"name": "pickle", "configuration": {"protocol": 5}}]),
        (f"{INNER} codecs", [{"name": "bytes"}, {"name": "numcodecs.zlib"}]),
        (f"{INNER} codecs 1 name", "evil.module:Codec"),
        ("storage_transformers", [{"name": "pickle"}]),
    ],
)
def test_z8_z9_an_array_of_another_shape_type_or_codec(
    root: Path, where: str, value: object
) -> None:
    edit(root / "records" / "zarr.json", where, value)
    refused(partial(opened, root), BundleError, root / "records" / "zarr.json")


@pytest.mark.parametrize("brackets", [b"[", b'{"a":'])
def test_z8_a_description_that_would_exhaust_a_parser(root: Path, brackets: bytes) -> None:
    for name in ("zarr.json", "records/zarr.json"):
        (root / name).write_bytes(brackets * 10**5)
        refused(partial(opened, root), BundleError, root)


def test_z9_metadata_of_zarr_2_is_not_even_seen(root: Path, tmp_path: Path) -> None:
    """Reading a pickle filter would run code."""
    marker = tmp_path / "ran"
    pickled = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    v2: dict[str, object] = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O"}
    v2 |= {"fill_value": None, "order": "C", "compressor": None}
    v2 |= {"filters": [{"id": "pickle", "protocol": 2}]}
    for folder in (root, root / "records", root / "evil"):
        folder.mkdir(exist_ok=True)
        (folder / ".zarray").write_text(json.dumps(v2))
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        (folder / "0").write_bytes(pickled)
    opened(root)
    assert not marker.exists()


@pytest.mark.parametrize("where", [f"{INNER} codecs 1", f"{INNER} index_codecs 1", "codecs 0"])
def test_z10_compressed_chunks(root: Path, where: str) -> None:
    """No compression is accepted, so nothing can unpack to more than its size, here to a TiB."""
    codec = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    edit(root / "records" / "zarr.json", where, codec)
    frame = bytes.fromhex("28b52ffde0") + (2**40).to_bytes(8, "little")
    path = shard(root, 0)
    path.write_bytes(frame.ljust(path.stat().st_size, b"\0"))
    refused(partial(opened, root), BundleError, root / "records" / "zarr.json")
