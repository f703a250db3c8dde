"""Index array on disk: each token's record in a table store, or its class in an n-gram model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from stem_edge.files.plain_files import check_folder, damaged, read_plain
from stem_edge.numerics.quantize import I32
from stem_edge.tables.store import CRC_NBYTES
from stem_edge.tables.zarr_json import array_document, compare, naming, read_json


def index_metadata(tokens: int) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ]
    return array_document([tokens], "int32", [tokens], codecs)


def index_chunk(root: Path) -> Path:
    """Return the path of the only chunk of the index array in the folder `root`."""
    return root / "c" / "0"


def encode_index(index: I32) -> bytes:
    """Encode an index as the bytes of its chunk: little-endian int32, then a crc32c."""
    data = index.astype("<i4").tobytes()
    return data + int(google_crc32c.value(data)).to_bytes(CRC_NBYTES, "little")


def read_index(root: Path, tokens: int, records: int) -> I32:
    """Read the record number of each token, below `records`, from a file. Raises BundleError."""
    path = index_chunk(root)
    for folder in (root, path.parent):
        check_folder(folder)
    with naming(root / "zarr.json"):
        compare(read_json(root / "zarr.json"), index_metadata(tokens))
    expected = tokens * 4 + CRC_NBYTES
    data = read_plain(path, expected, "index")
    if len(data) != expected:
        more = " or more" if len(data) > expected else ""
        raise damaged(path, f"index has {len(data)} bytes{more}, expected {expected}")
    index = np.frombuffer(data, "<i4", tokens)
    if encode_index(index) != data:
        raise damaged(path, "the checksum of this index is wrong")
    if index.min() < 0 or index.max() >= records:
        found = f"{index.min()} to {index.max()}"
        raise damaged(path, f"refers to records {found}, expected 0 to {records - 1}")
    return index.astype(np.int32, copy=False)
